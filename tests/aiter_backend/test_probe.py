"""Which aiter is here: told by its signatures, once per process, and never because planlife is imported (R32, R43)."""

from __future__ import annotations

import inspect
import re
import sys
import threading
from dataclasses import replace
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from planlife import BackendUnavailableError, CapacityLadder, ConfigError, PlanManager, PlanSpec, aiter_library
from planlife.aiter_generation import tell_generation
from planlife.aiter_library import DEFINING_MODULE, AiterLibrary, ask_count, describe, probe, read
from planlife.backends.aiter_backend import AiterBackend
from planlife.configuration import absence_reasons
from planlife.testing.aiter_double import aiter_double
from tests.aiter_backend.recording_aiter import PACKAGES, RecordingAiter, install
from tests.child_process import run_python
from tests.eventually import EVENTUALLY_S


@pytest.fixture
def nothing_imported(monkeypatch):
    """And what the test imports is gone after it."""
    probe.cache_clear()  # this module asks while it is collected
    for name in [name for name in sys.modules if name.split(".")[0] == "aiter"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "aiter"]:
        del sys.modules[name]


def reasons_of(**changes: Any) -> tuple[str, ...]:
    """What a library with these changes lacks; the way out is in every line."""
    library, reasons = read(RecordingAiter().module(**changes))
    assert (library is None) == bool(reasons)
    assert all("pass 'triton'" in reason for reason in reasons)
    return reasons


def folder_of(tmp_path: Path, *files: str) -> Path:
    """An `aiter` on disk; importing it raises."""
    for file in ("__init__.py", *files):
        path = tmp_path / "aiter" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise OSError('no such device')")
    return tmp_path


def test_a_library_with_mandatory_plans_is_taken():
    assert reasons_of() == ()
    library = RecordingAiter().library()
    assert (library.can_use, library.workgroup_budget, library.nhd_max_query_length) == (None, None, None)


def test_an_aiter_that_is_not_there_is_told_with_where_it_comes_from(nothing_imported, monkeypatch):
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    (reason,) = absence_reasons("aiter")
    assert reason.startswith(
        "'aiter' is not installed: it comes with the ROCm images (PyPI's aiter is another project)"
    )
    with pytest.raises(BackendUnavailableError, match="not installed.*pass 'triton'"):
        PlanManager(
            PlanSpec(8, 1, 128, 16, max_context_tokens=256), ladder=CapacityLadder([1]), device="cpu", backend="aiter"
        )


def test_pypis_aiter_is_refused_by_name_and_not_imported(nothing_imported, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(folder_of(tmp_path)))
    (reason,) = probe().reasons
    assert "is not ROCm's kernel library: it has no aiter.ops, as PyPI's asyncio package of that name" in reason
    assert "pip uninstall aiter" in reason and str(tmp_path) in reason and "aiter" not in sys.modules


def test_a_file_of_that_name_on_the_path_is_to_be_taken_off_it(nothing_imported, monkeypatch, tmp_path):
    (tmp_path / "aiter.py").write_text("raise OSError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    (reason,) = probe().reasons
    assert f"the 'aiter' in {tmp_path / 'aiter.py'} is not ROCm's kernel library" in reason
    assert "else take it off the path (sys.path)" in reason and "aiter" not in sys.modules


@pytest.mark.parametrize("is_imported", [False, True])
@pytest.mark.parametrize("is_checkout", [False, True])
def test_a_folder_of_that_name_on_the_path_is_told_as_one(
    nothing_imported, monkeypatch, tmp_path, is_checkout, is_imported
):
    """As a checkout in the working directory: Python takes every folder for a package."""
    folder = tmp_path / "aiter"
    (folder / "csrc").mkdir(parents=True)
    if is_checkout:
        (folder / "aiter" / "ops" / "flydsl").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    if is_imported:
        import_module("aiter")
    (reason,) = probe().reasons
    assert reason.startswith(f"the 'aiter' found here is only a folder, {folder}, ")
    assert ("PyPI" in reason, "pip" in reason, "pass 'triton'" in reason) == (False, False, True)
    assert (f"whose package is {folder / 'aiter'}: install that, or put {folder} on the path" in reason) == is_checkout
    assert ("has no __init__.py and is no package" in reason) != is_checkout


def test_an_aiter_without_the_defining_module_is_too_old_and_not_imported(nothing_imported, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(folder_of(tmp_path, "ops/__init__.py")))
    (reason,) = probe().reasons
    assert f"has no {DEFINING_MODULE}, and so no plan_pa_decode: upgrade aiter" in reason
    assert "aiter" not in sys.modules


def a_library_on_disk(tmp_path: Path, *, before: str = "") -> str:
    """Puts one that planlife can use into a folder, and names that folder. before: what its module does first."""
    path = folder_of(tmp_path, "ops/__init__.py", "ops/flydsl/__init__.py", "ops/flydsl/pa_decode.py")
    for file in path.rglob("__init__.py"):
        file.write_text("")
    (path / "aiter/ops/flydsl/pa_decode.py").write_text(
        f"{before}\n"
        "from tests.aiter_backend.recording_aiter import PADecodePlan, RecordingAiter\n"
        "plan_pa_decode, pa_decode = RecordingAiter().plan_pa_decode, RecordingAiter().pa_decode\n"
    )
    return str(path)


def test_an_import_in_another_thread_is_waited_for(nothing_imported, monkeypatch, tmp_path):
    """Engines import aiter lazily: what a module has until its import ends tells nothing of it."""
    entered, goes_on = threading.Event(), threading.Event()
    gate = ModuleType("gate_of_a_test")
    gate.wait = lambda: (entered.set(), goes_on.wait(EVENTUALLY_S))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gate_of_a_test", gate)
    monkeypatch.syspath_prepend(a_library_on_disk(tmp_path, before="import gate_of_a_test; gate_of_a_test.wait()"))
    importer = threading.Thread(target=import_module, args=(DEFINING_MODULE,))
    importer.start()
    assert entered.wait(EVENTUALLY_S) and not hasattr(sys.modules[DEFINING_MODULE], "pa_decode")  # half of it is there
    answers: list[aiter_library.Probe] = []
    asker = threading.Thread(target=lambda: answers.append(probe()))
    asker.start()
    asker.join(0.05)
    assert not answers
    goes_on.set()
    for thread in (importer, asker):
        thread.join(EVENTUALLY_S)
    assert answers[0].reasons == () and probe() == answers[0]


def test_what_is_asked_within_the_import_itself_is_no_answer_for_later(nothing_imported, monkeypatch, tmp_path):
    said: list[tuple[str, ...]] = []
    gate = ModuleType("gate_of_a_test")
    gate.ask = lambda: said.append(probe().reasons)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gate_of_a_test", gate)
    monkeypatch.syspath_prepend(a_library_on_disk(tmp_path, before="import gate_of_a_test; gate_of_a_test.ask()"))
    assert probe().reasons == ()
    assert len(said) == 1 and said[0][0].startswith(f"{DEFINING_MODULE} is still being imported")


def test_an_import_that_failed_is_not_run_again_and_what_somebody_else_imports_is_seen(
    nothing_imported, monkeypatch, tmp_path
):
    """What a second attempt says is often of the first: names that are registered twice."""
    runs: list[int] = []
    gate = ModuleType("gate_of_a_test")

    def register() -> None:
        runs.append(1)
        if len(runs) < 3:
            raise OSError(f"attempt {len(runs)}: no such device")

    gate.register = register  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gate_of_a_test", gate)
    monkeypatch.syspath_prepend(a_library_on_disk(tmp_path, before="import gate_of_a_test; gate_of_a_test.register()"))
    first = probe()
    assert "attempt 1" in first.reasons[0]
    assert probe() == first and len(runs) == 1
    with pytest.raises(OSError, match="attempt 2"):
        import_module(DEFINING_MODULE)
    assert probe() == first and len(runs) == 2
    import_module(DEFINING_MODULE)
    assert probe().reasons == () and len(runs) == 3


def test_what_files_or_names_say_is_asked_anew(nothing_imported, monkeypatch, tmp_path):
    assert "'aiter' is not installed" in probe().reasons[0]
    monkeypatch.syspath_prepend(a_library_on_disk(tmp_path))
    assert probe().reasons == ()
    module = sys.modules[DEFINING_MODULE] = ModuleType(DEFINING_MODULE)
    assert "has no plan_pa_decode, pa_decode, PADecodePlan" in probe().reasons[0]
    vars(module).update(vars(RecordingAiter().module()))
    assert probe().library is not None


def test_a_double_that_is_put_in_place_later_is_seen_and_gone_when_it_is_taken_away(nothing_imported):
    assert probe().library is None
    with aiter_double(generation="G3") as outer:
        assert probe().library.decode is outer.functions["pa_decode"]
        with aiter_double(generation="G2") as inner:
            assert probe().library.decode is inner.functions["pa_decode"]
        assert probe().library.decode is outer.functions["pa_decode"]
    assert probe().library is None


def test_an_aiter_that_cannot_start_is_a_reason_and_not_an_exception(nothing_imported, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(folder_of(tmp_path, "ops/flydsl/pa_decode.py")))
    (reason,) = probe().reasons
    assert f"{DEFINING_MODULE} cannot be imported here (OSError: no such device)" in reason


@pytest.mark.parametrize("statement", ["import sys; sys.exit('no GPU')", "raise SystemExit('no GPU')"])
def test_an_aiter_that_exits_while_it_is_imported_ends_no_process(nothing_imported, monkeypatch, tmp_path, statement):
    folder = folder_of(tmp_path, "ops/flydsl/pa_decode.py")
    (folder / "aiter" / "__init__.py").write_text(statement)
    monkeypatch.syspath_prepend(str(folder))
    (reason,) = probe().reasons
    assert "cannot be imported here (SystemExit: no GPU): repair that, or pass 'triton'" in reason
    (folder / "aiter" / "__init__.py").write_text("raise KeyboardInterrupt")
    probe.cache_clear()
    with pytest.raises(KeyboardInterrupt):  # that is the user's
        probe()


@pytest.mark.parametrize("name", [*PACKAGES, DEFINING_MODULE])
def test_an_aiter_whose_import_is_blocked_is_not_taken_for_another_package(nothing_imported, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    (reason,) = probe().reasons
    assert reason.startswith(f"importing {name} is blocked in this process (sys.modules[{name!r}] is None): take")
    assert "pass 'triton'" in reason and "pip" not in reason


@pytest.mark.parametrize(
    ("error", "is_flydsl"),
    [
        ("ImportError('flydsl >= 0.2.4 is required')", True),
        ("ModuleNotFoundError(\"No module named 'flydsl.expr'\")", True),
        ("ImportError('FlyDSL is too old')", True),
        ("AttributeError(\"module 'aiter.ops.flydsl.pa_decode' has no attribute 'x'\")", False),
        ("OSError('/opt/aiter/ops/flydsl/kernels.so: cannot open')", False),
    ],
)
def test_flydsl_is_to_be_installed_only_where_it_is_what_fails(
    nothing_imported, monkeypatch, tmp_path, error, is_flydsl
):
    """aiter's own modules and folders have that name too."""
    folder = folder_of(tmp_path, "ops/flydsl/pa_decode.py")
    (folder / "aiter" / "__init__.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(str(folder))
    (reason,) = probe().reasons
    assert ("pip install 'planlife[rocm]'" in reason, ": repair that, " in reason) == (is_flydsl, not is_flydsl)


class Lazy(ModuleType):
    """Exports names lazily, and cannot."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"flydsl is needed for {name}")


def test_names_that_a_library_exports_lazily_and_cannot_give_are_a_reason_or_not_there():
    lazy, whole = Lazy(DEFINING_MODULE), RecordingAiter().module()
    library, reasons = read(lazy)
    assert library is None
    assert reasons == (
        f"{DEFINING_MODULE} cannot be read here (ImportError: flydsl is needed for plan_pa_decode): pip install "
        "'planlife[rocm]', or pass 'triton', 'torch' or 'auto'",
    )
    assert tell_generation(lazy, library).name == ""
    vars(lazy).update({name: getattr(whole, name) for name in ("plan_pa_decode", "pa_decode", "PADecodePlan")})
    library, reasons = read(lazy)
    assert reasons == () and library is not None and library.can_use is None
    assert tell_generation(lazy, library).newer_names == ()


def test_a_function_whose_signature_cannot_be_read_is_told_by_what_it_does_not_take():
    class Callable:
        def __call__(self) -> None: ...

        @property
        def __signature__(self) -> Any:
            raise RuntimeError("not before the first call")

    for function in (Callable(), dict.update):
        (reason,) = reasons_of(pa_decode=function)
        assert "the pa_decode of the aiter here does not take (output, query, " in reason


class Sealed:
    """No class can be derived from it."""

    def __init__(self, work_info, reduce_info, num_kv_heads, max_partitions, sliding_window=0, query_length=1): ...

    def __init_subclass__(cls) -> None:
        raise TypeError("final")


def make_a_plan(work_info, reduce_info, num_kv_heads, max_partitions, sliding_window=0, query_length=1): ...


@pytest.mark.parametrize(
    ("plan_type", "why"),
    [
        (make_a_plan, "must be a class, got <function make_a_plan"),
        (Sealed, r"must be a class that can be derived from, and Sealed cannot \(TypeError: final\)"),
    ],
)
def test_a_plan_type_that_planlife_can_make_no_plans_by_is_refused(plan_type, why):
    (reason,) = reasons_of(PADecodePlan=plan_type)
    assert re.search(f"the PADecodePlan of the aiter here {why}", reason)
    whole = RecordingAiter().library()
    with pytest.raises(ConfigError, match=f"plan_type of an AiterLibrary {why}"):
        replace(whole, plan_type=plan_type)
    # Where a predicate says what is served, nothing is derived.
    if plan_type is Sealed:
        assert reasons_of(PADecodePlan=Sealed, can_use_flydsl_pa_decode=RecordingAiter().pa_decode) == ()


@pytest.mark.parametrize("library", ["x", 0, object(), AiterLibrary, probe])
def test_what_is_no_library_is_refused_by_name(library):
    with pytest.raises(ConfigError, match="library must be an AiterLibrary, or None for the installed one, got "):
        AiterBackend(library=library)


@pytest.mark.parametrize("name", ["plan", "decode", "can_use", "workgroup_budget", "nhd_max_query_length"])
def test_what_cannot_be_called_is_no_function_of_a_library(name):
    whole = RecordingAiter().library()
    with pytest.raises(ConfigError, match=f"{name} of an AiterLibrary must be a function of aiter's, got 3 "):
        replace(whole, **{name: 3})
    if name in ("plan", "decode"):
        with pytest.raises(ConfigError, match=f"{name} of an AiterLibrary"):
            replace(whole, **{name: None})


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class MuteThing:
    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no attributes")


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (ValueError("two\n  lines"), "ValueError: two lines"),
        (ValueError(""), "ValueError"),
        (Mute(), "Mute, whose text cannot be had (RuntimeError)"),
        (MuteThing(), "MuteThing, whose text cannot be had (RuntimeError)"),
        ("yes", "'yes' (str)"),
        (torch.tensor(True), "a tensor on cpu"),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_what_a_strange_library_says_is_told_in_one_line_also_where_it_has_no_text(thing, text):
    assert describe(thing) == text


def test_an_aiter_whose_import_fails_without_a_text_is_a_reason(nothing_imported, monkeypatch, tmp_path):
    before = "from tests.aiter_backend.test_probe import Mute; raise Mute"
    monkeypatch.syspath_prepend(a_library_on_disk(tmp_path, before=before))
    (reason,) = probe().reasons
    assert "cannot be imported here (Mute, whose text cannot be had (RuntimeError)): repair that" in reason


@pytest.mark.parametrize(
    ("answer", "count"),
    [(7, 7), (torch.tensor(7), 7), (2**31 - 1, 2**31 - 1)]
    + [(one, None) for one in (0, -5, True, None, 1.5, 2**31, 10**30, MuteThing())],
    ids=lambda one: type(one).__name__,
)
def test_a_count_of_a_library_is_taken_only_where_it_is_one(answer, count):
    assert ask_count(lambda: answer) == count


def test_a_fork_without_plans_is_told_by_what_it_has_instead():
    nothing = {"plan_pa_decode": None, "PADecodePlan": None, "pa_decode": None}
    (reason,) = reasons_of(**nothing, flydsl_pa_decode=print)
    assert "has no plan_pa_decode, pa_decode, PADecodePlan: it has flydsl_pa_decode instead, as a fork does" in reason
    (reason,) = reasons_of(plan_pa_decode=None, make_pa_decode_plan=print)
    assert "has no plan_pa_decode: it has make_pa_decode_plan instead" in reason


# fmt: off
# pa_decode of before plans were mandatory: all parameters positional, by generation.
def optional_plan(output, query, key_cache, value_cache, context_lengths, block_tables, softmax_scale, query_length,
                  max_context_partition_num, compute_type=None, key_scale=None, value_scale=None, exp_sums=None,
                  max_logits=None, temporary_output=None, sinks=None, sliding_window=0, ps=True, work_plan=None): ...
def tuned_plan(output, query, key_cache, value_cache, context_lengths, block_tables, softmax_scale, query_length,
               compute_type=None, key_scale=None, value_scale=None, exp_sums=None, max_logits=None,
               temporary_output=None, sinks=None, sliding_window=0, work_plan=None, tuned_file=None,
               max_context_length=None): ...
def default_plan(output, query, key_cache, value_cache, context_lengths, block_tables, softmax_scale, query_length, *,
                 compute_type=None, key_scale=None, value_scale=None, exp_sums=None, max_logits=None,
                 temporary_output=None, sinks=None, sliding_window=0, work_plan=None, max_context_length=None): ...
def two_head_dims(output, query, key_cache, value_cache, context_lengths, block_tables, softmax_scale, query_length,
                  max_context_partition_num, *, compute_type=None, key_scale=None, value_scale=None, exp_sums=None,
                  max_logits=None, temporary_output=None, sinks=None, sliding_window=0, work_plan=None,
                  max_context_length=None, value_head_size=None): ...
def dense_planner(context_lengths, num_kv_heads, *, max_partitions=256, workgroup_budget=None, plan=None): ...
# fmt: on


@pytest.mark.parametrize(
    ("old", "sign"),
    [
        (optional_plan, "takes max_context_partition_num, ps"),
        (tuned_plan, "takes tuned_file"),
        (default_plan, "has a default for work_plan"),
    ],
)
def test_an_aiter_of_before_mandatory_plans_is_refused_by_what_tells_it(old, sign):
    (reason,) = reasons_of(pa_decode=old)
    assert (
        f"of before work plans were mandatory (its pa_decode {sign}): upgrade aiter to one with ROCm/aiter#5809"
        in reason
    )


def test_a_text_for_two_head_dims_is_refused_by_what_it_takes():
    (reason,) = reasons_of(pa_decode=two_head_dims)
    assert "is of another contract (its pa_decode takes value_head_size, for V of another head_dim" in reason
    function = with_parameter(RecordingAiter().pa_decode, "value_head_size", default=None)
    assert reasons_of(pa_decode=function) == ()  # with mandatory plans it is one more parameter


def test_all_that_is_wrong_with_an_old_aiter_is_told_at_once():
    """C65."""
    planner, decode = reasons_of(plan_pa_decode=dense_planner, pa_decode=optional_plan)
    assert "plan_pa_decode of the aiter here does not take sliding_window, query_length" in planner
    assert "max_context_partition_num" in decode


def with_parameter(function: Any, name: str, *, default: Any) -> Any:
    """`function` with one more keyword-only parameter."""

    def newer(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    more = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
    newer.__signature__ = signature.replace(parameters=[*signature.parameters.values(), more])
    return newer


@pytest.mark.parametrize("name", ["pa_decode", "plan_pa_decode"])
def test_a_newer_aiter_may_have_more_parameters_while_they_have_defaults(name):
    """C44."""
    function = getattr(RecordingAiter(), name)
    assert reasons_of(**{name: with_parameter(function, "lookahead", default=None)}) == ()
    (reason,) = reasons_of(**{name: with_parameter(function, "lookahead", default=inspect.Parameter.empty)})
    assert (
        f"the {name} of the aiter here needs lookahead, which this planlife does not know: upgrade planlife" in reason
    )


# fmt: off
def budget(device, *, kv_dtype, head_dim, block_size, query_length, query_group_size, sliding_window=0): ...
def nhd(device, *, kv_dtype, head_dim, block_size, query_group_size): ...
# fmt: on


def test_newer_functions_are_used_where_they_can_be_called_as_announced():
    fake = RecordingAiter()
    names = ("can_use_flydsl_pa_decode", "pa_decode_default_workgroup_budget", "pa_decode_nhd_max_query_length")
    announced = dict(zip(names, (fake.pa_decode, budget, nhd), strict=True))
    planner = with_parameter(fake.plan_pa_decode, "max_batch_size", default=None)
    library = fake.library(**announced, plan_pa_decode=planner)
    assert (library.can_use, library.workgroup_budget, library.nhd_max_query_length) == tuple(announced.values())
    other = fake.library(**dict.fromkeys(names, lambda shape: True))
    assert (other.can_use, other.workgroup_budget, other.nhd_max_query_length) == (None, None, None)


def test_names_come_from_the_defining_module_though_the_package_shadows_it(monkeypatch):
    """C45: the package's attribute of the submodule's name is the function here."""
    fake = RecordingAiter()
    install(monkeypatch, fake.module())
    assert sys.modules["aiter.ops.flydsl"].pa_decode == fake.pa_decode  # positive control
    library, _ = probe()
    assert library is not None and (library.plan, library.decode) == (fake.plan_pa_decode, fake.pa_decode)


def test_a_process_asks_once(monkeypatch):
    install(monkeypatch, RecordingAiter().module())
    asked = []
    monkeypatch.setattr(aiter_library, "read", lambda module, read=read: asked.append(module) or read(module))
    assert [probe(), probe()][0].library is not None
    assert len(asked) == 1


def test_importing_planlife_imports_no_aiter(tmp_path):
    code = (
        "import sys, planlife, planlife.manager, planlife.aiter_library, planlife.backends.aiter_backend\n"
        "print('aiter' in sys.modules)\n"
        "planlife.aiter_library.probe()\n"
        "print('aiter' in sys.modules)\n"
    )
    for name in ("aiter", "aiter/ops", "aiter/ops/flydsl"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "aiter/ops/flydsl/pa_decode.py").write_text("")
    run = run_python("-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}")
    assert run.stdout.splitlines() == ["False", "True"], run.stderr


@pytest.mark.skipif(probe().library is None, reason="no aiter with work plans here")
@pytest.mark.parametrize("name", ["plan_pa_decode", "pa_decode", "PADecodePlan"])
def test_the_fakes_signatures_are_the_installed_librarys(name):
    def shape(function: Any) -> list[tuple[str, Any, bool]]:
        parameters = inspect.signature(function).parameters.values()
        return [(one.name, one.kind, one.default is inspect.Parameter.empty) for one in parameters]

    assert shape(getattr(sys.modules[DEFINING_MODULE], name)) == shape(getattr(RecordingAiter().module(), name))
