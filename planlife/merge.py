"""Two partial results of one attention call become one: context-parallel ranks, cascades over a shared prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .call_check import is_broadcast
from .errors import ConfigError, is_tensor, shown
from .spec import QUERY_DTYPES, dtype_name

if TYPE_CHECKING:
    import torch


def merge(
    output: torch.Tensor,
    lse: torch.Tensor,
    other_output: torch.Tensor,
    other_lse: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over two disjoint sets of keys, from the results over each: exact, whichever comes first.

    output, other_output: bfloat16, float16 or float32[query rows, q_heads, head_dim], both of one dtype.
    lse, other_lse: float32[query rows, q_heads], as `pa_decode(lse=...)` fills them: natural logs, -inf where nothing
        was attended; what the output holds there is not used. At most one of the two may have been decoded with sinks,
        and it must attend something in every row that the other does: an empty row has no sink.
    out, out_lse: where the result goes; new tensors if None. May be any of the inputs.
    Returns (output, lse) of both together: zeros and -inf where neither attended anything. FP32 inside.

    Raises ConfigError, before anything is written. Capture: yes. Syncs: no. Allocates: temporaries through torch, and
    what is not given of out and out_lse.
    """
    # Imported here: importing planlife loads no torch.
    from .ambient import undisturbed
    from .kernels.torch_merge import merge_partials

    with undisturbed():
        _check_all(output, lse, other_output, other_lse, out, out_lse)
        return merge_partials(output, lse, other_output, other_lse, out, out_lse)


def _check_all(output: Any, lse: Any, other_output: Any, other_lse: Any, out: Any, out_lse: Any) -> None:
    _check_output("output", output)
    _check_like("other_output", other_output, "output", output)
    shape = tuple(output.shape)[:-1]
    for name, one in (("lse", lse), ("other_lse", other_lse), ("out_lse", out_lse)):
        if one is not None or name != "out_lse":
            _check_lse(name, one, shape, output.device)
    if out is not None:
        _check_like("out", out, "output", output)
    for name, one in (("out", out), ("out_lse", out_lse)):
        if one is not None and is_broadcast(one):
            raise ConfigError(
                f"merge: {name} has strides {list(one.stride())}, which put several numbers in one place; pass memory "
                "of its own for each."
            )


def _check_output(name: str, tensor: Any) -> None:
    _check_tensor(name, tensor)
    if dtype_name(tensor.dtype) not in QUERY_DTYPES or len(tensor.shape) != 3:
        raise ConfigError(
            f"merge: {name} is {_described(tensor)}, wanted [query rows, q_heads, head_dim] of "
            f"{', '.join(QUERY_DTYPES)}."
        )


def _check_like(name: str, tensor: Any, model_name: str, model: Any) -> None:
    _check_tensor(name, tensor)
    if _described(tensor) != _described(model):
        raise ConfigError(f"merge: {name} is {_described(tensor)}, but {model_name} is {_described(model)}.")


def _check_lse(name: str, tensor: Any, shape: tuple[int, ...], device: Any) -> None:
    _check_tensor(name, tensor)
    wanted = f"float32{list(shape)} on {device}"
    if _described(tensor) != wanted:
        raise ConfigError(
            f"merge: {name} is {_described(tensor)}, but output wants {wanted}: one per query row and query head."
        )


def _check_tensor(name: str, tensor: Any) -> None:
    if not is_tensor(tensor):
        raise ConfigError(f"merge: {name} must be a tensor, got {shown(tensor)}.")


def _described(tensor: Any) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)} on {tensor.device}"
