from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import octavo
import octavo_bench
from octavo.errors import ConfigError, RunError
from octavo_bench import results
from octavo_bench.readme import Measured

ROW: dict[str, Any] = {"model": "124m", "tokens": 100, "recipe": "folded", "seed": 0, "heldout_loss": 1.5}


def parity(**changes: Any) -> results.Result:
    fields: dict[str, Any] = {
        "kind": "parity",
        "date": "2026-11-21",
        "hardware": "nvidia-h200",
        "versions": {"torch": "2.11.0"},
        "command": "octavo train",
        "rows": (ROW,),
    }
    return results.Result(**{**fields, **changes})


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    result = parity(rows=({**ROW, "note": "extra keys stay"},))
    path = results.write(result, tmp_path)
    assert path == tmp_path / "2026-11-21-nvidia-h200-parity.json"
    assert results.load(path) == result
    assert results.latest("parity", tmp_path) == result
    assert set(json.loads(path.read_text())) == {"kind", "date", "hardware", "versions", "command", "rows"}


def test_latest_is_the_newest_day_whatever_the_order_of_writing(tmp_path: Path) -> None:
    results.write(parity(date="2026-11-22", command="new"), tmp_path)
    results.write(parity(date="2026-11-21", command="old"), tmp_path)
    newest = results.latest("parity", tmp_path)
    assert newest is not None and newest.command == "new"
    assert len(list(tmp_path.rglob("*.json"))) == 2  # each is stored once


def test_each_workload_has_its_newest_session(tmp_path: Path) -> None:
    def session(date: str, *workloads: str) -> None:
        figures = {"implementation": "bf16", "ms": 1.0, "ratio_to_bf16": 1.0, "peak_gib": 1.0}
        rows = tuple({"workload": name, **figures} for name in workloads)
        results.write(parity(kind="step", date=date, rows=rows), tmp_path)

    session("2026-11-20", "a", "b", "c")
    session("2026-11-21", "b")
    found = [(result.date, [row["workload"] for row in result.rows]) for result in results.newest("step", tmp_path)]
    assert found == [("2026-11-21", ["b"]), ("2026-11-20", ["a", "c"])]
    assert results.newest("hf", tmp_path) == []


def test_ranks_and_layouts_are_sessions_of_their_own(tmp_path: Path) -> None:
    figures = {"implementation": "bf16", "tokens_per_s_per_gpu": 1.0, "ratio_to_bf16": 1.0, "peak_gib": 1.0}

    def session(date: str, ranks: int, *layouts: str) -> None:
        told = {"workload": "a", "ranks": ranks, "wire_bytes": 1}
        rows = tuple({**told, "layout": layout, **figures} for layout in layouts)
        results.write(parity(kind="distributed", date=date, rows=rows), tmp_path)

    session("2026-11-20", 4, "data")
    session("2026-11-21", 2, "data")
    session("2026-11-21", 2, "data, graph")
    found = results.newest("distributed", tmp_path)
    assert [[(row["ranks"], row["layout"]) for row in result.rows] for result in found] == [
        [(2, "data"), (2, "data, graph")],
        [(4, "data")],
    ]


ARMS = "bf16", "torchao tensorwise", "octavo folded", "octavo block"


def measured(date: str, *arms: str, workload: str = "a", hardware: str = "nvidia-h200") -> results.Result:
    figures = {"ms": 1.0, "ratio_to_bf16": 1.0, "peak_gib": 1.0}
    rows = tuple({"workload": workload, "implementation": arm, **figures} for arm in arms)
    return parity(kind="step", date=date, hardware=hardware, rows=rows)


def shown(directory: Path) -> list[tuple[str, str, int]]:
    """Return date, machine and rows of the sessions that tables show."""
    return [(result.date, result.hardware, len(result.rows)) for result in results.newest("step", directory)]


def test_a_partial_session_hides_no_whole_one(tmp_path: Path) -> None:
    results.write(measured("2026-11-20", *ARMS), tmp_path)
    results.write(measured("2026-11-21", *ARMS[:2]), tmp_path)
    results.write(measured("2026-11-22", "bf16", workload="b"), tmp_path)
    assert shown(tmp_path) == [("2026-11-22", "nvidia-h200", 1), ("2026-11-20", "nvidia-h200", 4)]
    results.write(measured("2026-11-23", *ARMS), tmp_path)
    assert shown(tmp_path) == [("2026-11-23", "nvidia-h200", 4), ("2026-11-22", "nvidia-h200", 1)]


@pytest.mark.parametrize("kind", ["step", "hf"])
def test_a_session_replaces_none_of_another_machine(tmp_path: Path, kind: str) -> None:
    trainer = {"model": "a", "mode": "eager", "tokens_per_s": 1.0}
    for date, hardware in (("2026-11-20", "nvidia-h200"), ("2026-11-21", "nvidia-h100")):
        result = measured(date, *ARMS, hardware=hardware)
        results.write(replace(result, kind=kind, rows=tuple(row | trainer for row in result.rows)), tmp_path)
    found = [(result.hardware, len(result.rows)) for result in results.newest(kind, tmp_path)]
    assert found == [("nvidia-h100", 4), ("nvidia-h200", 4)]


def test_a_session_with_another_case_is_not_partial(tmp_path: Path) -> None:
    results.write(measured("2026-11-20", *ARMS), tmp_path)
    results.write(measured("2026-11-21", "bf16", "octavo folded", "octavo delayed"), tmp_path)
    assert shown(tmp_path) == [("2026-11-21", "nvidia-h200", 3)]


def test_a_partial_session_of_the_day_does_not_replace_the_whole_one(tmp_path: Path) -> None:
    path = results.write(measured("2026-11-20", *ARMS), tmp_path)
    before = path.read_text()
    with pytest.raises(ConfigError, match=r"has 2 rows more, .*: a octavo folded; a octavo block\. Measure all"):
        results.write(measured("2026-11-20", *ARMS[:2]), tmp_path)
    assert path.read_text() == before
    again = measured("2026-11-20", *reversed(ARMS))
    assert results.load(results.write(again, tmp_path)) == again


def test_results_of_other_software_are_not_replaced(tmp_path: Path) -> None:
    path = results.write(measured("2026-11-20", *ARMS), tmp_path)
    before = path.read_text()
    with pytest.raises(ConfigError, match="versions was"):
        results.write(replace(measured("2026-11-20", *ARMS), versions={"torch": "2.13.0"}), tmp_path)
    assert path.read_text() == before


def test_no_figure_of_the_repository_is_stored_twice() -> None:
    directory = Path(__file__).parents[2] / "benchmarks" / "results"
    files = [*directory.rglob("*.json")]
    assert files and len({path.read_bytes() for path in files}) == len(files)
    for path in files:
        results.load(path)


def test_kinds_build_on_results_and_not_the_other_way() -> None:
    places = [str(Path(module.__path__[0]).parent) for module in (octavo, octavo_bench)]
    program = (
        f"import sys; sys.path[:0] = {places}; import octavo_bench.results; print('octavo_bench.kind' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_later_mode_hides_no_earlier_one(tmp_path: Path) -> None:
    figures = {"model": "m", "implementation": "bf16", "tokens_per_s": 1.0, "ratio_to_bf16": 1.0, "peak_gib": 1.0}
    for date, modes in (("2026-11-20", ("eager", "torch_compile")), ("2026-11-21", ("torch_compile",))):
        rows = tuple({**figures, "mode": mode} for mode in modes)
        results.write(parity(kind="hf", date=date, rows=rows), tmp_path)
    shown = [(result.date, [row["mode"] for row in result.rows]) for result in results.newest("hf", tmp_path)]
    assert shown == [("2026-11-21", ["torch_compile"]), ("2026-11-20", ["eager"])]
    assert [row["mode"] for row in Measured.read(tmp_path).rows("hf")] == ["torch_compile", "eager"]


def test_never_measured_is_none(tmp_path: Path) -> None:
    assert results.latest("step", tmp_path) is None


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = results.write(parity(), tmp_path)
    before = path.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(RunError, match="No space"):
        results.write(parity(command="second"), tmp_path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == [path.name]


@pytest.mark.skipif(os.name != "posix", reason="file modes of POSIX")
def test_others_may_read_it(tmp_path: Path) -> None:
    assert results.write(parity(), tmp_path).stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "paritty"}, "Did you mean 'parity'"),
        ({"date": "21.11.2026"}, "YYYY-MM-DD"),
        ({"hardware": "NVIDIA H200"}, "'nvidia-h200' is"),
        ({"rows": ()}, "no rows"),
        (
            {"rows": (ROW, {"model": "124m", "tokens": 1, "recipe": "x"})},
            r"rows\[1\]: the key 'seed' is missing",
        ),
        ({"rows": ({**ROW, "tokens": 1.5},)}, "'tokens' must be int, got 1.5"),
        ({"rows": ({**ROW, "seed": True},)}, "'seed' must be int, got True"),
        ({"rows": ({**ROW, "heldout_loss": "1.5"},)}, "'heldout_loss' must be float"),
        ({"rows": ({**ROW, "heldout_loss": float("nan")},)}, "must be finite"),
        ({"rows": ({**ROW, "extra": float("inf")},)}, "'extra' is inf"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parity(**changes)


def test_an_integer_serves_as_a_float() -> None:
    assert parity(rows=({**ROW, "heldout_loss": 2},)).rows[0]["heldout_loss"] == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": "parity", "colour": 1}'])
def test_a_bad_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.json"):
        results.load(path)


def test_a_bad_row_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = results.write(parity(), tmp_path)
    mapping = json.loads(path.read_text())
    del mapping["rows"][0]["recipe"]
    path.write_text(json.dumps(mapping))
    with pytest.raises(ConfigError, match=r"parity\.json: .*rows\[0\]: the key 'recipe' is missing"):
        results.load(path)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "intel-xeon-cpu-2.20ghz"),
        ("AMD EPYC 7B13 ", "amd-epyc-7b13"),
    ],
)
def test_slug(name: str, slug: str) -> None:
    assert results.slug(name) == slug


def test_this_machine_can_be_written_down() -> None:
    assert results.hardware() == results.slug(results.hardware()) != ""
    assert {"python", "torch", "octavo"} <= set(results.versions())
    parity(hardware=results.hardware(), versions=results.versions(), date=results.today())


def test_replacing_a_field_checks_again() -> None:
    with pytest.raises(ConfigError, match="unknown kind"):
        replace(parity(), kind="")


def step(*workloads: str, **changes: Any) -> results.Result:
    row = {"implementation": "bf16", "ms": 1.0, "ratio_to_bf16": 1.0, "peak_gib": 0.1}
    rows = tuple({"workload": workload, **row} for workload in workloads)
    return parity(**{"kind": "step", "rows": rows, **changes})


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("step", {"workload": "tiny", "implementation": "octavo folded"}),
        ("gemm", {"shape": "8x8x8", "kernel": "reference", "operands": "row", "accumulate": "slow"}),
        ("kernels", {"kernel": "transpose", "shape": "8 x 8"}),
    ],
)
def test_a_row_may_say_what_failed_in_place_of_its_figures(kind: str, row: dict[str, Any]) -> None:
    assert parity(kind=kind, rows=({**row, "error": "RuntimeError: no"},)).rows[0]["error"] == "RuntimeError: no"
    with pytest.raises(ConfigError, match="is missing"):
        parity(kind=kind, rows=(row,))
    with pytest.raises(ConfigError, match=f"'{next(iter(row))}' is missing"):
        parity(kind=kind, rows=({"error": "RuntimeError: no"},))
    with pytest.raises(ConfigError, match="'error' must be str"):
        parity(kind=kind, rows=({**row, "error": None},))


def test_a_training_run_may_not_fail() -> None:
    with pytest.raises(ConfigError, match="'heldout_loss' is missing"):
        parity(rows=({"model": "124m", "tokens": 1, "recipe": "x", "seed": 0, "error": "no"},))


def test_merging_keeps_the_models_that_were_not_trained_again() -> None:
    def trained(*models: str, loss: float) -> results.Result:
        run = {"tokens": 8, "recipe": "bf16", "seed": 0, "heldout_loss": loss}
        return parity(rows=tuple({"model": model, **run} for model in models))

    merged = results.merge(trained("small", "large", loss=1.0), trained("large", loss=2.0))
    assert [(row["model"], row["heldout_loss"]) for row in merged.rows] == [("small", 1.0), ("large", 2.0)]


def test_merging_keeps_the_workloads_that_were_not_measured_again() -> None:
    merged = results.merge(step("a", "b", command="first"), step("b", "c", command="second"))
    assert [row["workload"] for row in merged.rows] == ["a", "b", "c"]
    assert merged.command == "first; second"
    assert results.merge(merged, step("d", command="first; third")).command == "first; second; third"
    again = step("a", command="second")
    assert results.merge(step("a", command="first"), again) == again


@pytest.mark.parametrize("change", [{"date": "2026-11-20"}, {"hardware": "other"}, {"versions": {"torch": "2.13.0"}}])
def test_one_file_is_of_one_day_machine_and_software(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(change))} was .* cannot be one file"):
        results.merge(step("a", **change), step("b"))


def test_a_failure_is_one_line() -> None:
    assert results.failure(ValueError("first\nsecond")) == "ValueError: first"
    assert results.failure(MemoryError()) == "MemoryError: no message"
