"""Numbers that the toy engine makes on the host, on their way to its device."""

from __future__ import annotations

import torch


def upload(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """`tensor` of the host on `device`; itself where that is the CPU.

    Capture: no. Syncs: no, because the copy is from pinned memory, which torch keeps until it is done. Allocates: yes.
    """
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
