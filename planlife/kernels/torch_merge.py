"""The merge of two partial softmaxes in tensor ops: FP32 inside, and what an empty partial holds reaches nothing."""

from __future__ import annotations

import torch

from ..ambient import plain
from .torch_decode import TINY
from .torch_write import overwrite


@plain
@torch.no_grad()
def merge_partials(
    output: torch.Tensor,
    lse: torch.Tensor,
    other_output: torch.Tensor,
    other_lse: torch.Tensor,
    out: torch.Tensor | None,
    out_lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `planlife.merge.merge`, over tensors that were checked. Writes last: out and out_lse may be any of the inputs.

    Capture: yes. Syncs: no. Allocates: temporaries through torch.
    """
    larger = torch.maximum(lse, other_lse)
    is_empty = larger == -torch.inf
    # By the difference to the larger one: exp(lse - merged lse) would be as coarse as the last bit of a large lse.
    weight, other_weight = torch.exp(lse - larger), torch.exp(other_lse - larger)  # NaN where both are empty
    total = weight + other_weight
    merged = _share(output, lse, weight / total) + _share(other_output, other_lse, other_weight / total)
    merged_lse = torch.where(is_empty, -torch.inf, larger + total.log())
    out = merged.to(output.dtype) if out is None else overwrite(out, merged)
    return out, merged_lse if out_lse is None else overwrite(out_lse, merged_lse)


def _share(output: torch.Tensor, lse: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What one partial adds: nothing if it is empty, and else never by a weight of 0, which would turn inf to NaN."""
    is_empty = (lse == -torch.inf)[..., None]
    return torch.where(is_empty, 0.0, output.float() * weight.clamp_min(TINY)[..., None])
