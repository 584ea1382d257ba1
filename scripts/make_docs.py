"""Fills in what the code knows better than a writer: signatures, docstrings, options, messages, drawings.

Written here are the parts of a page between `<!-- made: WHAT -->` and `<!-- end -->`, what is printed and raised in its
```pycon blocks, and the drawings; the rest is written by hand. With --check nothing is written, and what is not up to
date is named: exit status 1.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import aiter_tables
import make_layout_drawings
import page_sessions

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
#: Whose every public name has a part on a page.
PUBLIC = ("planlife", "planlife.testing")

_PART = re.compile(r"^<!-- made: (?P<maker>[\w-]+)(?: (?P<name>\S+))? -->\n(?P<body>.*?)^<!-- end -->$", re.M | re.S)
_LINE_COLUMNS = 100
#: Made by a manager only: users see no constructor.
_HANDED_OUT = ("StepPlan", "OffPlan")
#: The errors of this package are one table, which is a part of its own.
_TREE = "planlife"
_FACTS = (
    "Raises",
    "Returns",
    "Capture:",
    "Syncs:",
    "Allocates:",
    "Syncs, Allocates:",
    "Threads:",
    "Owns:",
    "Borrows:",
    "Address-stable:",
)


def main() -> None:
    is_check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not is_check:
        sys.exit("usage: python scripts/make_docs.py [--check]")
    logging.getLogger("planlife").addHandler(logging.NullHandler())
    wanted = {page: filled(page.read_text(encoding="utf-8")) for page in sorted(DOCS.rglob("*.md"))}
    wanted |= {DOCS / name: draw() for name, draw in make_layout_drawings.DRAWINGS.items()}
    outdated = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    missing = missing_names("\n".join(text for path, text in wanted.items() if path.suffix == ".md"))
    if not is_check:
        for path in outdated:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8", newline="\n")
    complaints = [f"{path.relative_to(REPOSITORY)} is not what the code says" for path in outdated if is_check]
    complaints += [
        f"{name} is public and on no page: put '<!-- made: api {name} -->' where it belongs" for name in missing
    ]
    if complaints:
        sys.exit("\n".join([*complaints, "Then run: python scripts/make_docs.py"]))


def filled(page: str) -> str:
    """The page with all its made parts as the code has them now. Raises LookupError for a part that nothing makes."""

    def fill(part: re.Match[str]) -> str:
        made = MAKERS[part["maker"]](*filter(None, [part["name"]]))
        head = part[0].partition("\n")[0]
        return f"{head}\n\n{made.strip()}\n\n<!-- end -->"

    return page_sessions.replayed(_PART.sub(fill, page))


def parts(page: str) -> dict[str, str]:
    """The bodies of a page's made parts by the dotted name that they are about."""
    return {part["name"]: part["body"] for part in _PART.finditer(page) if part["name"]}


def missing_names(pages: str) -> list[str]:
    """Public names that have no part in these pages."""
    found = parts(pages)
    names = [(module, name) for module in PUBLIC for name in import_module(module).__all__]
    return [
        f"{module}.{name}"
        for module, name in names
        if f"{module}.{name}" not in found
        and not (
            module == _TREE and _is_error(getattr(import_module(module), name)) and "<!-- made: errors -->" in pages
        )
    ]


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def resolve(dotted: str) -> Any:
    """What a dotted name says. Raises LookupError."""
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"{dotted} does not exist") from error


def api(dotted: str) -> str:
    """A function, class or constant: signature, docstring, and the public members of a class."""
    found, name = resolve(dotted), dotted.rpartition(".")[2]
    if not callable(found):
        return _fence(f"{dotted}: {type(found).__name__}  # of {', '.join(map(_value, found))}")
    names = _names(found)
    text = [_fence(_class_line(dotted, found) or _signature(dotted, found)), *described(found, names)]
    if isinstance(found, type):
        bare = []
        for member_name, member, shown in _members(found):
            if member is not None and member.__doc__:
                names_of_member = _names(_getter(member))
                text += [f"### `{name}.{member_name}`", _fence(shown), *described(member, names_of_member)]
            else:
                bare.append(shown)
        if bare:
            text += ["Further members:", _fence("\n".join(bare))]
    return "\n\n".join(text)


def _class_line(dotted: str, found: Any) -> str:
    """A class that users do not make by calling it; "" for all else."""
    if _is_error(found):
        return f"class {dotted}({', '.join(base.__name__ for base in found.__bases__)})"
    is_protocol = getattr(found, "_is_protocol", False)
    return f"class {dotted}" if is_protocol or dotted.rpartition(".")[2] in _HANDED_OUT else ""


def _members(cls: type) -> Iterator[tuple[str, Any, str]]:
    """(name, member, how it is written) of a class, in the order of its source; fields are in its signature."""
    for name, raw in vars(cls).items():
        if name.startswith("_") or inspect.ismemberdescriptor(raw) or inspect.isclass(raw):
            continue
        if isinstance(raw, (property, cached_property)):
            returns = _annotation(inspect.signature(_getter(raw)).return_annotation)
            yield name, raw, f"{name}: {returns}"
        elif isinstance(raw, (staticmethod, classmethod)):
            yield name, raw.__func__, _signature(f"{cls.__name__}.{name}", getattr(cls, name))
        elif inspect.isfunction(raw):
            yield name, raw, _signature(name, raw, skip_first=True)
        elif not is_dataclass(cls):
            yield name, None, f"{name} = {_value(raw)}"


def _getter(member: Any) -> Any:
    """The function that a property calls; anything else as it is."""
    return getattr(member, "fget", None) or getattr(member, "func", None) or member


def _names(found: Any) -> set[str]:
    """What a docstring may have entries for."""
    names = set(getattr(found, "__slots__", ())) | set(getattr(found, "__annotations__", ()))
    if callable(found) and not _is_error(found) and not getattr(found, "_is_protocol", False):
        names |= set(inspect.signature(found).parameters)
    return names | (set(vars(found)) if isinstance(found, type) else set())


def _signature(name: str, found: Any, *, skip_first: bool = False) -> str:
    signature = inspect.signature(found)
    parameters = list(signature.parameters.values())[skip_first:]
    written = []
    is_by_name = False  # after *args, or the star that stands for them
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not is_by_name:
            written.append("*")
        is_by_name = is_by_name or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        text = star + one.name + ("" if one.annotation is one.empty else f": {_annotation(one.annotation)}")
        written.append(text if one.default is one.empty else f"{text} = {_value(one.default)}")
    returns = _annotation(signature.return_annotation)
    if inspect.isgeneratorfunction(inspect.unwrap(found)) and found is not inspect.unwrap(found):
        returns = returns.replace("Iterator[", "AbstractContextManager[", 1)
    arrow = "" if isinstance(found, type) or not returns else f" -> {returns}"
    line = f"{name}({', '.join(written)}){arrow}"
    if len(line) <= _LINE_COLUMNS:
        return line
    return "\n    ".join([f"{name}(", *(f"{one}," for one in written)]) + f"\n){arrow}"


def _annotation(annotation: Any) -> str:
    if annotation is inspect.Signature.empty:
        return ""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return re.sub(r"InitVar\[(.*)\]", r"\1", text.strip("'\""))


def _value(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value).replace("<factory>", "...")


def _fence(code: str) -> str:
    return f"```py\n{code}\n```"  # "python" is for code that runs


def described(found: Any, names: set[str]) -> list[str]:
    """A docstring as Markdown: an entry `name: ...` is a list item, and what a graph author looks for is set off."""
    doc = getattr(found, "__doc__", None) or ""
    if is_dataclass(found) and doc.startswith(f"{getattr(found, '__name__', '')}("):
        doc = ""  # made by dataclass
    blocks: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        items: list[str] = []
        for kind, text in _entries(" ".join(paragraph.split()), names):
            if kind == "item":
                items.append(text)
                continue
            if items:
                blocks.append("\n".join(items))
                items = []
            blocks.append(text)
        if items:
            blocks.append("\n".join(items))
    return [block for block in blocks if block]


def _entries(text: str, names: set[str]) -> Iterator[tuple[str, str]]:
    label = re.compile(r"(?:^|(?<=[.;)] ))(?:(?P<fact>" + "|".join(_FACTS) + r") |(?P<names>\w+(?:, \w+)*): )")
    found = [one for one in label.finditer(text) if one["fact"] or set(one["names"].split(", ")) <= names]
    yield "text", _escaped(text[: found[0].start()] if found else text).strip()
    facts: list[str] = []
    for one, after in zip(found, [*found[1:], None], strict=False):
        body = _escaped(text[one.end() : after.start() if after else len(text)].strip())
        if one["fact"]:
            facts.append(f"*{one['fact']}* {body}")
            continue
        if facts:
            yield "text", " ".join(facts)
            facts = []
        labels = ", ".join(f"`{name}`" for name in one["names"].split(", "))
        yield "item", f"- {labels}: {body.rstrip(';')}"
    if facts:
        yield "text", " ".join(facts)


def _escaped(text: str) -> str:
    """Text in which only `code` is Markdown."""
    pieces = re.split(r"(`[^`]*`)", text)
    active = r"(?<=\S)\*|\*(?=\S)|(?<!\w)_|\](?=[\[(])|<(?=[\w/!])"
    pieces[::2] = [re.sub(active, r"\\\g<0>", piece) for piece in pieces[::2]]
    return "".join(pieces)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def errors() -> str:
    """The tree of public errors."""
    tree = import_module(_TREE)
    rows = ["| error | is a | |", "|---|---|---|"]
    for name in tree.__all__:
        error = getattr(tree, name)
        if _is_error(error):
            bases = [base.__name__ for base in error.__bases__ if base is not Exception]
            rows.append(_row(f"`{name}`", ", ".join(f"`{base}`" for base in bases), _escaped(error.__doc__ or "")))
    return "\n".join(rows)


def unserved() -> str:
    """What no backend serves, by feature: the names that ask for it, why not, the way out."""
    from planlife.unserved import UNSERVED

    names: dict[Any, list[str]] = {}
    for name, known in UNSERVED.items():
        names.setdefault(known.asks_for, []).append(f"`{name}`")
    rows = ["| | asked for by | why not | instead |", "|---|---|---|---|"]
    for kind, asking in names.items():
        feature = re.sub(r" (is|are)$", "", kind.feature)
        rows.append(_row(feature, ", ".join(asking), _escaped(kind.why), _escaped(kind.way_out)))
    return "\n".join(rows)


def commands() -> str:
    """Every command of the command line, its options and what they mean."""
    from planlife.commands import planlife as group

    return "\n\n".join(_command("planlife", group))


def _command(path: str, command: Any) -> Iterator[str]:
    inner = getattr(command, "commands", None)
    if inner is not None:
        for name in sorted(inner):
            if not inner[name].hidden:
                yield from _command(f"{path} {name}", inner[name])
        return
    import click

    arguments = [one.human_readable_name for one in command.params if isinstance(one, click.Argument)]
    yield f"### `{' '.join([path, *arguments])}`"
    yield "\n\n".join(_escaped(" ".join(one.split())) for one in (command.help or "").split("\n\n"))
    rows = [_option(one) for one in command.params if isinstance(one, click.Option) and not one.hidden]
    if rows:
        yield "\n".join(["| option | unless given | |", "|---|---|---|", *rows])


def _option(option: Any) -> str:
    choices = getattr(option.type, "choices", None)
    flags = ", ".join(option.opts) + "".join(f" / {opposite}" for opposite in option.secondary_opts)
    if not option.is_flag:
        flags += " " + (option.metavar or ("|".join(choices) if choices else option.type.name.upper()))
    is_told = isinstance(option.default, (str, int, float)) and not option.is_flag
    default = f"`{option.default}`" if is_told else ""
    return _row(f"`{flags}`", default, _escaped(option.help or ""))


MAKERS: dict[str, Callable[..., str]] = {
    "api": api,
    "errors": errors,
    "unserved": unserved,
    "commands": commands,
    "aiter-versions": aiter_tables.versions,
    "aiter-names": aiter_tables.newer_names,
    "aiter-caches": aiter_tables.caches,
    "aiter-first-run": aiter_tables.first_run,
}


if __name__ == "__main__":
    main()
