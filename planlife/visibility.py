"""Which physical GPU an index means: the environment variables that hide and renumber devices, one after the other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

#: Letters of other scripts count as decimal digits too, and no machine has so many devices as ten digits say.
_INDEX = re.compile("[0-9]{1,9}")

VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Visibility:
    """What the variables leave.

    physical: for each index the physical device, as an index or a UUID; None where no variable says.
    notes: what each variable does, with its numbers. wrong: what cannot be meant, each with its way out.
    """

    physical: tuple[str, ...] | None
    notes: tuple[str, ...]
    wrong: tuple[str, ...]


def read_visibility(environ: Mapping[str, str], platform: str) -> Visibility:
    """What the variables leave on a platform: "cuda", "rocm", or anything else, which reads none of them.

    rocm: ROCR_VISIBLE_DEVICES filters the physical devices and renumbers them from 0; HIP_VISIBLE_DEVICES, or without
    it CUDA_VISIBLE_DEVICES, then indexes what is left. cuda: CUDA_VISIBLE_DEVICES alone.
    """
    asked = {name: environ[name] for name in VARIABLES if name in environ}
    read = _variables_read(asked, platform)
    notes = [f"{name}={value} is not read {_why_unread(platform)}" for name, value in asked.items() if name not in read]
    wrong: list[str] = []
    physical: tuple[str, ...] | None = None
    for name in read:
        left = _apply(name, asked[name], physical, notes)
        if physical is not None and len(left) < len(_entries(asked[name])):
            wrong.append(_cut_twice(asked, name, physical, left))
        elif not left:
            wrong.append(f"{name}={asked[name]} leaves no device. Unset it, or name devices once each, from 0.")
        elif len(left) < len(_entries(asked[name])):
            wrong.append(
                f"{name}={asked[name]} names {len(_entries(asked[name]))} devices and leaves {len(left)}: a list ends "
                "at its first entry that is no device. Name devices by their index from 0, or by UUID."
            )
        physical = left
        if not left:
            break  # nothing to pick from
    return Visibility(physical, tuple(notes), tuple(wrong))


def _variables_read(asked: Mapping[str, str], platform: str) -> list[str]:
    if platform == "cuda":
        wanted = ["CUDA_VISIBLE_DEVICES"]
    elif platform == "rocm":
        by_hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in asked else "CUDA_VISIBLE_DEVICES"
        wanted = ["ROCR_VISIBLE_DEVICES", by_hip]
    else:
        wanted = []
    return [name for name in wanted if name in asked]


def _why_unread(platform: str) -> str:
    return {
        "rocm": "beside HIP_VISIBLE_DEVICES",
        "cuda": "by a CUDA build of torch",
        "cpu": "by a CPU build of torch",
    }.get(platform, "without a torch")


def _entries(value: str) -> list[str]:
    return [entry.strip() for entry in value.split(",")] if value.strip() else []


def _apply(name: str, value: str, physical: tuple[str, ...] | None, notes: list[str]) -> tuple[str, ...]:
    """The physical devices that are left of `physical` (None: all, as they are numbered), in their new order."""
    left: list[str] = []
    for entry in _entries(value):
        if not _INDEX.fullmatch(entry):
            device = entry if entry.startswith(("GPU-", "MIG-")) else None
        elif physical is None:
            device = str(int(entry))
        else:
            device = physical[int(entry)] if int(entry) < len(physical) else None
        if device is None:
            notes.append(f"{name}={value}: {entry} is no device here, and ends the list")
            break
        if device in left:
            notes.append(f"{name}={value}: {entry} comes twice, which leaves no device")
            return ()
        left.append(device)
    before = "the physical devices" if physical is None else f"the {len(physical)} that are left, renumbered from 0"
    now = ", ".join(f"{index} = physical {device}" for index, device in enumerate(left)) or "none"
    notes.append(f"{name}={value} picks from {before}: {now}")
    return tuple(left)


def _cut_twice(asked: Mapping[str, str], name: str, physical: tuple[str, ...], left: tuple[str, ...]) -> str:
    first = "ROCR_VISIBLE_DEVICES"
    every_index = ",".join(str(index) for index in range(len(physical)))
    count = len(_entries(asked[name]))
    return (
        f"{first}={asked[first]} leaves {len(physical)} devices and numbers them 0..{len(physical) - 1}; "
        f"{name}={asked[name]} then picks from those, so that {len(left)} of its {count} are left. Set {first} alone, "
        f"or {name}={every_index} beside it."
    )
