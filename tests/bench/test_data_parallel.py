"""The bench of data parallelism trains each recipe by one rank and by several, on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo.errors import ConfigError, RunError
from octavo_bench import data_parallel, results, study
from octavo_bench.cli import bench
from octavo_bench.data_parallel import KIND
from octavo_bench.results import Row


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, write_text: Callable[[Path], Path]) -> list[Row]:
    folder = tmp_path_factory.mktemp("data-parallel")
    text = write_text(folder / "text")
    flags = "--preset tiny --model.layers 1 --eval-tokens 512 --steps 6 --log-every 1 --device cpu"
    shared = [*flags.split(), "--source", str(text), "--cache", str(folder / "cache")]
    jobs = data_parallel.jobs(["folded"], [0], 2)
    return study.run_all(jobs, shared, out=folder / "out", slots=4, report=lambda line: None)


def test_one_and_two_ranks_have_the_same_losses_but_for_rounding(rows: list[Row]) -> None:
    assert [(row["recipe"], row["ranks"]) for row in rows] == [("folded", 1), ("folded", 2)]
    results.Result(kind="data-parallel", date="2026-11-23", hardware="x", versions={}, command="c", rows=tuple(rows))
    alone, shared = rows
    assert len(shared["training_loss"]) == 6 and shared["tokens"] == alone["tokens"]
    assert shared["training_loss"] == pytest.approx(alone["training_loss"], rel=5e-4)
    assert shared["gap"] == pytest.approx(shared["heldout_loss"] - alone["heldout_loss"], abs=1e-6)
    assert "gap" not in alone
    other = abs(rows[0]["training_loss"][-1] / rows[0]["training_loss"][0] - 1)
    assert other > 2e-2  # the loss falls by far more than what is allowed above


def test_the_table_has_both_differences() -> None:
    own = {"model": "llama-1m", "tokens": 64, "seed": 0}
    losses = {("bf16", 1): 2.0, ("bf16", 2): 2.02, ("folded", 1): 2.1, ("folded", 2): 2.0}
    rows: list[Row] = [
        own | {"recipe": recipe, "ranks": ranks, "heldout_loss": loss} for (recipe, ranks), loss in losses.items()
    ]
    rows[1] |= {"gap": 0.02, "gap_95": 0.01}
    rows[3] |= {"gap": -0.1}
    *_, bf16, folded = data_parallel.by_ranks(rows).splitlines()
    assert bf16 == "| bf16 | 0 | 2 | 2.0000 | 2.0200 | +1.00 % ± 0.50 % |  |  |"
    assert folded == "| folded | 0 | 2 | 2.1000 | 2.0000 | -4.76 % | +5.00 % | -0.99 % |"


def test_an_error_of_ranks_is_told_in_their_words_not_torchruns(tmp_path: Path) -> None:
    job = study.Job({"name": "bad"}, ("--recipe", "nonsense"), ranks=2)
    with pytest.raises(RunError, match=r"bad: exit code 1.*unknown recipe 'nonsense'"):
        study.run_all([job], ["--preset", "tiny", "--device", "cpu"], out=tmp_path, report=lambda line: None)


def test_one_rank_has_nothing_beside_it() -> None:
    with pytest.raises(ConfigError, match="--ranks: a sharded run needs two"):
        data_parallel.command(ranks=1)


def test_a_flag_leaves_the_other_flags_at_the_defaults_of_this_study() -> None:
    _, bound, *_ = bench.parse_args(["data-parallel", "--steps", "5"])
    runs = bound.arguments["runs"]
    assert (runs.steps, runs.seeds, runs.preset) == (5, "0", "parity-10m-cuda")


def test_unknown_recipes_are_named_before_anything_is_trained() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'folded'"):
        data_parallel.command(recipes="bf16,foldd")


def test_a_run_of_one_rank_sees_one_of_the_gpus_that_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert [study._one_gpu(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["2", "5", "2"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [study._one_gpu(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["0", "1", "0"]


def test_a_run_of_several_ranks_waits_for_as_many_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside: dict[str, list[str]] = {}
    running: list[str] = []

    class Process:
        returncode = 0
        polls = 0

        def __init__(self, name: str) -> None:
            self.name = name

        def poll(self) -> int | None:
            self.polls += 1
            if self.polls < 2:
                return None
            running.remove(self.name)
            return 0

        def terminate(self) -> None: ...

    def start(job: study.Job, slots: list[int], arguments: object, out: Path) -> study._Worker:
        running.append(job.name)
        beside[job.name] = [*running]
        return study._Worker(job=job, slots=slots, process=Process(job.name), run=out)  # type: ignore[arg-type]

    monkeypatch.setattr(study, "_start", start)
    monkeypatch.setattr(study, "_finish", lambda worker: "")
    monkeypatch.setattr(study.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(study, "_row", lambda job, out: {})
    jobs = [study.Job({"name": name}, (), ranks=1 + (name == "both")) for name in ("a", "b", "both", "c")]
    study.run_all(jobs, [], out=tmp_path, slots=2, report=lambda line: None)
    assert beside == {"a": ["a"], "b": ["a", "b"], "both": ["both"], "c": ["c"]}


def test_runs_of_several_ranks_stay_beside_the_one_rank_of_their_machine(tmp_path: Path) -> None:
    for hardware, ranks, alone in (("nvidia-h200", 2, 1.5), ("nvidia-h100", 4, 1.6)):
        shared = {"model": "m", "tokens": 9, "recipe": "bf16", "seed": 0}
        rows = [
            shared | {"ranks": 1, "heldout_loss": alone},
            shared | {"ranks": ranks, "heldout_loss": 2.0, "gap": 0.5},
        ]
        result = results.Result(
            kind="data-parallel", date="2026-11-26", hardware=hardware, versions={}, command="c", rows=tuple(rows)
        )
        results.write(result, tmp_path)
    table = KIND.table(tmp_path)
    assert "| bf16 | 0 | 2 | 1.5000 | 2.0000 |" in table and "| bf16 | 0 | 4 | 1.6000 | 2.0000 |" in table
