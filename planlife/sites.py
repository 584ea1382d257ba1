"""Sites from a file: what a manager would be made with, in JSON, for the commands that ask about it."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, NoReturn

from .configuration import check_sites
from .errors import ConfigError
from .ladder import CapacityLadder
from .spec import PlanSpec

_SPEC_FIELDS = {field.name: field for field in fields(PlanSpec)}
_FIELDS = ("ladder", *_SPEC_FIELDS)
_REQUIRED = ("ladder", *(name for name, field in _SPEC_FIELDS.items() if field.default is MISSING))


class SitesError(ConfigError):
    """A file of sites that cannot be used. The message is one line and names the file and the place in it."""


@dataclass(frozen=True)
class Sites:
    """PlanSpecs and ladders by site name, as PlanManager takes them."""

    specs: dict[str, PlanSpec]
    ladders: dict[str, CapacityLadder]


#: Where no file is given: one site of a common shape, a 70B model's layer on one of eight ranks.
DEFAULT_SITES = Sites(
    {"default": PlanSpec(8, 1, 128, 16, max_context_tokens=131_072)}, {"default": CapacityLadder.powers_of_two(64)}
)


def read_sites(path: str | os.PathLike[str]) -> Sites:
    """The sites of a JSON file: {"site": {"num_q_heads": 8, ..., "ladder": [1, 2, 4, 8]}, ...}.

    The fields are PlanSpec's, by their names; dtypes by name; "ladder" lists the row counts that plans exist for.
    A field that is left out has PlanSpec's default.

    Raises SitesError. Capture: n/a. Syncs: no. Allocates: host memory only.
    """
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8-sig") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise SitesError(f"{name}: not UTF-8 text: {error.reason} at byte {error.start}.") from error
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise SitesError(f"{name!r} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    try:
        found = json.loads(text, object_pairs_hook=_Object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise SitesError(f"{name}, line {error.lineno}, column {error.colno}: {error.msg}.") from error
    except _RefusedError as error:
        raise SitesError(f"{name}: {error}.") from error
    except (ValueError, RecursionError) as error:  # an int of thousands of digits; nested thousands deep
        raise SitesError(f"{name}: {error}.") from error
    if not isinstance(found, dict) or not found:
        raise SitesError(
            f'{name}: wanted an object of sites by name, such as {{"dense": {{"num_q_heads": 8, ...}}}}, '
            f"got {_kind(found)}."
        )
    specs: dict[str, PlanSpec] = {}
    ladders: dict[str, CapacityLadder] = {}
    for site, values in found.items():
        place = f"{name}, site {site!r}"
        if not isinstance(values, dict):
            hint = f" ({site} is a field: put it inside a named site)" if site in _FIELDS else ""
            raise SitesError(f"{place}: wanted an object of PlanSpec's fields, got {_kind(values)}{hint}.")
        _check_fields(place, values)
        try:
            ladders[site] = _ladder(values["ladder"])
            specs[site] = PlanSpec(**{field: value for field, value in values.items() if field != "ladder"})
        except ConfigError as error:
            raise SitesError(f"{place}: {error}") from error
    try:
        check_sites(specs, ladders)
    except ConfigError as error:
        raise SitesError(f"{name}: {error}") from error
    return Sites(specs, ladders)


class _RefusedError(Exception):
    pass


class _Object(dict[str, Any]):
    """A JSON object; a key that comes twice would silently lose a site or a field."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        for name in self:
            if names.count(name) > 1:
                raise _RefusedError(f"{name!r} comes twice in one object")


def _refuse_constant(constant: str) -> NoReturn:
    raise _RefusedError(f"{constant} is no JSON number")


def _check_fields(place: str, values: dict[str, Any]) -> None:
    for field in values:
        if field not in _FIELDS:
            near = difflib.get_close_matches(field, _FIELDS, n=1)
            way_out = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(_FIELDS)}."
            raise SitesError(f"{place}: there is no field {field!r}; {way_out}")
    missing = [field for field in _REQUIRED if field not in values]
    if missing:
        raise SitesError(f"{place}: {', '.join(missing)} must be given.")


def _ladder(sizes: Any) -> CapacityLadder:
    if not isinstance(sizes, list):
        raise ConfigError(f"ladder must be a list of row counts, such as [1, 2, 4, 8], got {_kind(sizes)}.")
    return CapacityLadder(sizes)


def _kind(value: object) -> str:
    if isinstance(value, dict):
        return "an object" if value else "an empty object"
    if isinstance(value, list):
        return "a list"
    return json.dumps(value)
