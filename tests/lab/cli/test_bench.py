"""`octavo bench` as a user meets it, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cyclopts import App

from octavo.errors import ConfigError, UnsupportedError
from octavo.lab.cli import bench as command
from octavo_bench import kernels as bench_kernels
from octavo_bench import moe, results
from octavo_bench.kind import Output
from octavo_bench.results import Row

Octavo = Callable[[str], int]


def test_step_prints_writes_and_adds(octavo: Octavo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f'--only "octavo folded" --steps 1 --device cpu --write {tmp_path}'
    assert octavo(f"bench step --workload tiny --layers 1 {flags}") == 0
    printed = capsys.readouterr()
    assert "octavo folded" in printed.out and "when timed again at the end" in printed.out
    assert "written: " in printed.err
    first = results.latest("step", tmp_path)
    assert first is not None and {row["workload"] for row in first.rows} == {"custom"}
    assert {row["shape"]["layers"] for row in first.rows} == {1}
    assert first.command == 'octavo bench step --workload tiny --only "octavo folded" --layers 1 --steps 1'

    assert octavo(f"bench step --workload tiny --json {flags}") == 0
    rows = json.loads(capsys.readouterr().out)
    both = results.latest("step", tmp_path)
    assert both is not None and [row["workload"] for row in both.rows] == ["custom"] * 2 + ["tiny"] * 2
    assert list(both.rows[2:]) == rows


def test_gemm_and_kernels_print_json(octavo: Octavo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo(f"bench gemm --shape 16x16x32 --device cpu --repeats 1 --json --write {tmp_path}") == 0
    assert {row["shape"] for row in json.loads(capsys.readouterr().out)} == {"16x16x32"}
    assert octavo(f"bench kernels --only transpose --device cpu --repeats 1 --json --write {tmp_path}") == 0
    assert {row["kernel"] for row in json.loads(capsys.readouterr().out)} == {"transpose"}
    assert {results.load(path).kind for path in tmp_path.glob("*.json")} == {"gemm", "kernels"}


def test_what_failed_is_written_and_the_exit_code_is_1(
    octavo: Octavo, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise ValueError("broken")

    monkeypatch.setattr(bench_kernels, "CASES", (bench_kernels.Case("add", (8, 8), lambda *_: (), fails),))
    assert octavo(f"bench kernels --device cpu --write {tmp_path}") == 1
    assert "failed: ValueError: broken" in capsys.readouterr().out
    written = results.latest("kernels", tmp_path)
    assert written is not None and written.rows[0]["error"] == "ValueError: broken"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("step --workload tyni", "there is no workload 'tyni'. Did you mean 'tiny'"),
        ("step --workload tiny --heads 3", "3 heads do not divide dim 128"),
        ("step --workload tiny --steps 0", "--steps: 0 is not a positive number"),
        ("gemm --shape 8192x4096", "--shape: '8192x4096' is not MxNxK"),
        ("gemm --device tpu", "'tpu' is none of auto, cpu, cuda"),
        ("kernels --only transposed", "no kernel begins with 'transposed'. Did you mean 'transpose'"),
        ("kernels --repeats 0", "--repeats: 0 is not a positive number"),
    ],
)
def test_wrong_flags_are_named(octavo: Octavo, line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        octavo(f"bench {line} {'' if '--device' in line else '--device cpu'}")
    assert message in str(caught.value)


def test_outside_the_repository_a_message_says_where_the_benchmarks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PACKAGE", "octavo_bench_of_a_clone")
    monkeypatch.setattr(command, "BENCHMARKS", tmp_path)
    app = App()
    command.add_bench(app)
    with pytest.raises(UnsupportedError, match="clone the repository"):
        app(["bench", "step", "--only", "x"], exit_on_error=False, print_error=False)


def test_who_measures_a_part_is_told_what_tables_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(*recipes: str) -> Iterator[Row]:
        shape = {"workload": "w", "ms": 1.0, "ratio_to_bf16": 1.0}
        yield from ({**shape, "implementation": recipe} for recipe in recipes)

    output = Output(write=tmp_path)
    monkeypatch.setattr(results, "today", lambda: "2026-11-20")
    output.keep(moe.KIND, rows("folded", "block"), device="cpu")
    assert "tables" not in capsys.readouterr().err
    monkeypatch.setattr(results, "today", lambda: "2026-11-21")
    output.keep(moe.KIND, rows("folded"), device="cpu")
    [whole] = tmp_path.glob("2026-11-20-*.json")
    assert f"tables still show {whole.name}, which has more cases of this session" in capsys.readouterr().err
    output.keep(moe.KIND, rows("folded", "block"), device="cpu")
    assert "tables" not in capsys.readouterr().err


def test_rows_of_a_measurement_that_was_stopped_replace_no_result(tmp_path: Path) -> None:
    def rows(*factors: float) -> Iterator[Row]:
        yield from ({"workload": "w", "implementation": f"i{x}", "ms": x, "ratio_to_bf16": 1.0} for x in factors)

    def stopped() -> Iterator[Row]:
        yield from rows(3.0)
        raise KeyboardInterrupt

    output = Output(write=tmp_path)
    output.keep(moe.KIND, rows(1.0, 2.0), device="cpu")
    committed = sorted(path for path in tmp_path.rglob("*.json"))
    before = [path.read_bytes() for path in committed]
    with pytest.raises(KeyboardInterrupt):
        output.keep(moe.KIND, stopped(), device="cpu")
    assert [path.read_bytes() for path in committed] == before
    (draft,) = tmp_path.glob("unfinished-*/*.json")
    assert [row["ms"] for row in results.load(draft).rows] == [3.0]
    other = tmp_path / "unfinished-another" / draft.name
    other.parent.mkdir()
    other.write_bytes(draft.read_bytes())
    output.keep(moe.KIND, rows(4.0), device="cpu")
    assert other.exists() and not draft.exists()  # only its own
