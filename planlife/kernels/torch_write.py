"""How torch ops write what is a caller's: outputs, log-sum-exps."""

from __future__ import annotations

import torch


@torch.inference_mode()
def overwrite(target: torch.Tensor, source: torch.Tensor | float) -> torch.Tensor:
    """Copy or fill `target` in place, as a kernel does: in whatever mode it was made, unseen by autograd.

    In this mode all may be written: inference tensors in no other, and those that require grad in no_grad besides.
    Versions count on. Returns `target`. Capture: yes. Syncs: no. Allocates: no.
    """
    return target.copy_(source) if isinstance(source, torch.Tensor) else target.fill_(source)
