"""The pages under docs/ do not rot: their code runs, and what they point at exists."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import make_docs
import make_layout_drawings
import page_sessions
import pytest

import planlife
from planlife import CapacityLadder, PlanManager, PlanSpec, Step
from planlife.events import KINDS
from planlife.manager import ON_MISS
from planlife.testing import FakeBackend, FakeDevice, FakeTensor
from planlife.testing.builder_suite import SCENARIOS, Unsupported, run_scenario

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
API, REFUSED = DOCS / "api.md", DOCS / "refused.md"
ERRORS = {name for name in planlife.__all__ if name.endswith("Error")}


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)


def code_of(page: Path) -> dict[str, Any]:
    """The names that a page's code defines, its blocks run in order as one module."""
    names: dict[str, Any] = {"__name__": page.stem}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), names)
    return names


TESTING = code_of(DOCS / "testing.md")
TESTS_OF_THE_PAGE = sorted(name for name in TESTING if name.startswith("test_") and name != "test_my_builder")


def test_the_page_on_testing_has_tests() -> None:
    assert len(TESTS_OF_THE_PAGE) == 7


@pytest.mark.parametrize("name", TESTS_OF_THE_PAGE)
def test_a_test_on_the_page_about_testing_passes(name: str) -> None:
    TESTING[name]()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_builder_on_the_page_about_testing_passes_the_suite(scenario: str) -> None:
    try:
        TESTING["test_my_builder"](partial(run_scenario, scenario, num_steps=6))
    except Unsupported:
        assert scenario in ("ubatches", "dummies")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "testing.md"], ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page: Path) -> None:
    code_of(page)


def defined_tests(path: Path) -> set[str]:
    """Names that pytest would collect from a file: functions, classes, and Class::method."""
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names.update(f"{node.name}::{method.name}" for method in node.body if isinstance(method, ast.FunctionDef))
    return names


def missing_tests(text: str) -> list[str]:
    """Every `path::name` in `text` that is no test of this repository."""
    return [
        f"{path}::{name}"
        for path, name in re.findall(r"`([\w/]+\.py)::([\w:]+)`", text)
        if not (REPOSITORY / "tests" / path).is_file() or name not in defined_tests(REPOSITORY / "tests" / path)
    ]


def missing_names(text: str) -> list[str]:
    """Every dotted name in `text`, as in `planlife.spec.Step` or `planlife.Step(lens)`, that leads nowhere."""
    return [name for name in re.findall(r"`(planlife(?:\.\w+)+)(?:\(.*?\))?`", text) if not leads_somewhere(name)]


def leads_somewhere(dotted: str) -> bool:
    first, *names = dotted.split(".")
    found: Any = import_module(first)
    for index, name in enumerate(names):
        if not hasattr(found, name):
            try:
                import_module(".".join([first, *names[: index + 1]]))
            except ImportError:
                return False
        found = getattr(found, name)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_points_at_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    assert missing_tests(text) == []
    assert missing_names(text) == []


def test_a_page_that_points_at_nothing_is_found() -> None:
    """Positive control of the checks above."""
    text = "`test_docs.py::test_none` `none/test_it.py::test_it` `test_docs.py::test_what_a_page_points_at_exists`"
    assert missing_tests(text) == ["test_docs.py::test_none", "none/test_it.py::test_it"]
    text = "`planlife.manager.PlanManager.plan_for(step)` `planlife.manager.PlanManager.none` `planlife.none`"
    assert missing_names(text) == ["planlife.manager.PlanManager.none", "planlife.none"]


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings: of two that are the same the second one ends in -1."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S), re.M)
    slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
    seen: Counter[str] = Counter()
    found = set()
    for slug in slugs:
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def dead_links(page: Path, text: str) -> list[str]:
    """Every relative link in `text` whose file, or whose heading in it, is not there."""
    dead = []
    for link in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", [REPOSITORY / "README.md", *PAGES], ids=lambda page: page.stem)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    assert dead_links(page, page.read_text("utf-8")) == []


def test_a_dead_link_is_found() -> None:
    text = "[a](api.md#errors) [b](none.md) [c](api.md#none) [d](#errors) [e](#none) [f](https://none) ![](none.svg)"
    assert dead_links(API, text) == ["none.md", "api.md#none", "#none", "none.svg"]


def test_readme_lists_every_page() -> None:
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    assert [page.name for page in DOCS.glob("*.md") if f"](docs/{page.name})" not in readme] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_picture_says_in_words_what_it_shows(page: Path) -> None:
    assert [words for words in re.findall(r"!\[(.*?)\]\(", page.read_text("utf-8")) if len(words.split()) < 5] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_has_from_the_code_is_what_the_code_says(page: Path) -> None:
    text = page.read_text("utf-8")
    assert text == make_docs.filled(text), "run: python scripts/make_docs.py"


@pytest.mark.parametrize("name", make_layout_drawings.DRAWINGS)
def test_the_drawings_are_made_from_the_layouts_of_now(name: str) -> None:
    assert (DOCS / name).read_text("utf-8") == make_layout_drawings.DRAWINGS[name](), "run: python scripts/make_docs.py"


def test_every_public_name_is_on_the_api_page() -> None:
    text = API.read_text("utf-8")
    assert make_docs.missing_names(text) == []
    shorter = text.replace("<!-- made: api planlife.merge -->", "").replace("<!-- made: errors -->", "")
    assert {"planlife.merge", "planlife.MintError"} <= set(make_docs.missing_names(shorter))  # the control


def test_a_part_about_a_name_that_does_not_exist_is_refused() -> None:
    for part in ("api planlife.none", "api planlife.none.PlanManager", "none"):
        with pytest.raises(LookupError):
            make_docs.filled(f"<!-- made: {part} -->\n<!-- end -->\n")


def written_signatures(name: str, body: str) -> dict[str, inspect.Signature]:
    """What a part of the API page shows, read back as Python: by the name of a method, "" for the thing itself."""
    found = {"": re.search(r"^```py\n(.*?)^```$", body, re.M | re.S)}
    found |= {one[1]: one for one in re.finditer(r"^### `\w+\.(\w+)`\n\n```py\n(.*?)^```$", body, re.M | re.S)}
    read = {}
    for member, fence in found.items():
        assert fence, name
        before, bracket, rest = fence[fence.lastindex].partition("(")
        if bracket and re.fullmatch(r"[\w.]+", before):
            names: dict[str, Any] = {}
            exec(f"from __future__ import annotations\ndef f({rest.strip()}: ...", names)
            read[member] = inspect.signature(names["f"])
    return read


def as_called(signature: inspect.Signature) -> list[tuple[str, object, object]]:
    return [
        (one.name, one.kind, ... if "factory" in repr(one.default) else one.default)
        for one in signature.parameters.values()
        if one.name != "self"
    ]


@pytest.mark.parametrize("module", make_docs.PUBLIC)
def test_what_the_api_page_shows_of_a_public_name_can_be_called_like_it(module: str) -> None:
    parts = make_docs.parts(API.read_text("utf-8"))
    num_signatures = 0
    for name in import_module(module).__all__:
        public = getattr(import_module(module), name)
        if f"{module}.{name}" not in parts:
            assert issubclass(public, planlife.PlanlifeError)
            continue
        body = parts[f"{module}.{name}"]
        for member, shown in written_signatures(name, body).items():
            real = getattr(public, member) if member else public
            assert as_called(shown) == as_called(inspect.signature(real)), (name, member)
            num_signatures += 1
        if inspect.isclass(public):
            members = {member for member in vars(public) if not member.startswith("_")}
            assert members - set(getattr(public, "__slots__", ())) - set(re.findall(r"\w+", body)) == set(), name
    assert num_signatures > 10


def missing_members(text: str) -> list[str]:
    """Every `PublicName.member` in `text` that the class does not have."""
    found = re.findall(rf"`({'|'.join(planlife.__all__)})\.(\w+)", text)
    return [
        f"{name}.{member}"
        for name, member in found
        if not hasattr(getattr(planlife, name), member)
        and member not in getattr(getattr(planlife, name), "__annotations__", ())
    ]


@pytest.mark.parametrize("page", [REPOSITORY / "README.md", *PAGES], ids=lambda page: page.stem)
def test_a_page_names_only_members_that_exist(page: Path) -> None:
    assert missing_members(page.read_text("utf-8")) == []


def test_a_member_that_does_not_exist_is_found() -> None:
    assert missing_members("`PlanManager.none` `PlanManager.warm` `PlanSpec.plan_of` `PlanSpec.none`") == [
        "PlanManager.none",
        "PlanSpec.none",
    ]


def test_every_kind_of_event_is_on_the_api_page() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", API.read_text("utf-8").partition("| kind | when |")[2], re.M)
    named = [name for row in rows for name in re.findall(r"\w+", row)]
    assert sorted(named) == sorted(KINDS)


def test_every_error_is_shown_by_a_refusal_that_happens() -> None:
    shown = set(re.findall(r"^(\w+Error): ", REFUSED.read_text("utf-8"), re.M))
    assert shown == ERRORS - {"PlanlifeError"}


def test_a_session_that_says_something_else_is_corrected() -> None:
    text = REFUSED.read_text("utf-8")
    changed = text.replace("no site 'sparse'; this manager was given 'dense'.", "no such site.")
    assert changed != text
    assert page_sessions.replayed(changed) == text


def test_every_setting_of_on_miss_is_explained() -> None:
    assert [setting for setting in ON_MISS if f'`"{setting}"`' not in REFUSED.read_text("utf-8")] == []


def fallback_reasons() -> dict[str, str]:
    """What plan_for says in each case where it falls back, by the case; the one between two threads is left out."""
    spec, ladder = PlanSpec(4, 2, 32, 16, max_context_tokens=512), CapacityLadder([2, 8])
    two, eight, nine = (Step(FakeTensor(rows)) for rows in (2, 8, 9))

    def fall_back(*unused: Any, **also_unused: Any) -> None:
        raise AssertionError("nothing is decoded here")

    def manager(backend: FakeBackend | None = None, device: FakeDevice | None = None, **options: Any) -> PlanManager:
        options = {"fallback": fall_back, **options}
        return PlanManager(
            spec, ladder=ladder, device=device or FakeDevice(), backend=backend or FakeBackend(), **options
        )

    found = {
        "off": manager(enabled=False).plan_for(two),
        "site": manager(FakeBackend(spec_reasons=["no"])).plan_for(two),
        "step": manager(FakeBackend(step_reasons=["no"])).plan_for(two),
        "ladder": manager().plan_for(nine),
        "never minted": manager().plan_for(two),
    }
    recording = manager()
    with recording.graph():
        found["recording"] = recording.plan_for(two)
    device = FakeDevice()
    full = manager(device=device, budget_bytes=manager().min_budget_bytes())
    with full.capture_phase():
        full.warm()
        full.plan_for(two)
        with full.graph() as graph:
            full.plan_for(two)
    found["no room"] = full.plan_for(eight)
    full.release(graph)
    device.fail_at = 1
    found["out of memory"] = full.plan_for(eight)
    assert {plan.route for plan in found.values()} == {"fallback"}
    return {case: plan.reason for case, plan in found.items()}


def test_every_reason_of_a_fallback_has_one_row() -> None:
    table = REFUSED.read_text("utf-8").partition("| reason begins with |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(.*?)` \|", table, re.M)
    patterns = {row: ".*".join(re.escape(part.strip()) for part in row.split("…")) for row in rows}
    matched = {
        case: [row for row, pattern in patterns.items() if re.match(pattern, reason)]
        for case, reason in fallback_reasons().items()
    }
    assert all(len(found) == 1 for found in matched.values()), matched
    assert set(rows) - {found[0] for found in matched.values()} == {"evicted by another thread"}


@pytest.mark.parametrize(("letter", "last"), [("R", 48), ("C", 111)])
def test_every_requirement_and_case_has_one_row(letter: str, last: int) -> None:
    rows = re.findall(rf"^\| ({letter}\d+) \|.*\|$", (DOCS / "requirements.md").read_text("utf-8"), re.M)
    digits = 1 if letter == "R" else 2
    assert rows == [f"{letter}{number:0{digits}}" for number in range(1, last + 1)]


def test_a_row_names_a_test_or_says_what_is_missing() -> None:
    rows = re.findall(r"^\| [RC]\d+ \|.*\|$", (DOCS / "requirements.md").read_text("utf-8"), re.M)
    assert [row for row in rows if ".py::" not in row and "not yet" not in row] == []
