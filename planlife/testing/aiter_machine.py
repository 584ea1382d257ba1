"""A machine with an AMD GPU and aiter, as far as planlife can tell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ..aiter_library import architecture_name
from ..backends import aiter_backend
from ..torch_device import resolve_device
from .aiter_double import AiterDouble, aiter_double


@contextmanager
def aiter_machine(
    arch: str = "gfx942", *, device_type: str = "cpu", num_cu: int | None = None, **settings: Any
) -> Iterator[AiterDouble]:
    """Managers that are made in the `with` find the double of aiter, and take a `device_type` device for an `arch`.

    arch: as drivers write it, with or without its features. num_cu: None = what a manager counts on such a device.
    settings: as `aiter_double` takes them.
    On a GPU, where a call of the double takes milliseconds, minting leaves out caches of gigabytes.
    """
    if num_cu is None:
        num_cu = resolve_device(device_type).num_compute_units

    def architecture_of(device: Any) -> str:
        return architecture_name(arch) if device.name.partition(":")[0] == device_type else ""

    with aiter_double(arch=arch, num_cu=num_cu, device_type=device_type, **settings) as double:
        patched: dict[str, Any] = {"architecture_of": architecture_of}
        if device_type == "cuda":
            patched["WIDE_CACHE_BYTES"] = ()
        with mock.patch.multiple(aiter_backend, **patched):
            yield double
