"""The parity bench runs each recipe and seed in a process of its own and reads back what came out."""

import shutil

import pytest

from octavo.errors import ConfigError, RunError
from octavo.lab.models.factory import model_name
from octavo_bench import compare, results
from octavo_bench.study import run_all

TINY = ["--preset", "tiny", "--steps", "4", "--log-every", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory, write_text):
    folder = tmp_path_factory.mktemp("corpus")
    text = write_text(folder / "text")
    return [*TINY, "--source", str(text), "--cache", str(folder / "cache")]


@pytest.fixture(scope="module")
def study(small_corpus, tmp_path_factory):
    """Return what two recipes with two seeds gave, the lines told on the way, and the directory."""
    out, lines = tmp_path_factory.mktemp("study"), []
    rows = run_all(compare.jobs(["bf16", "folded"], [0, 1]), small_corpus, out=out, slots=2, report=lines.append)
    return rows, lines, out


def test_one_row_for_each_recipe_and_seed(study):
    rows, lines, out = study
    assert [(row["recipe"], row["seed"]) for row in rows] == [
        ("bf16", 0),
        ("folded", 0),
        ("bf16", 1),
        ("folded", 1),
    ]
    assert all(row["tokens"] == 4 * 4 * 32 for row in rows)
    assert rows[0]["heldout_loss"] != rows[2]["heldout_loss"]  # another seed is another run
    assert rows[0]["fp8_gemms"] == {} and rows[1]["fp8_gemms"] != {}
    assert sum("held-out loss" in line for line in lines) == 4
    curves = compare.curves(out, rows)
    assert curves[0]["steps"][-1] == 4 and len(curves[0]["loss"]) == len(curves[0]["steps"])
    assert curves[0]["loss"][0] == pytest.approx(curves[1]["loss"][0], rel=0.01)  # same weights, same first batch
    assert curves[0]["loss"] == pytest.approx(rows[0]["training_loss"], abs=1e-4)


def test_evidence_sets_recipes_beside_bf16_of_the_same_seed(study):
    rows, lines, out = study
    rows = compare.add_evidence(rows, out, report=lines.append)
    bf16, folded = rows[:2]
    assert {row["cosine_start"] for row in rows if row["recipe"] == "folded"} == {folded["cosine_start"]}
    assert "gap" not in bf16
    assert folded["gap"] == pytest.approx(folded["heldout_loss"] - bf16["heldout_loss"], abs=1e-6)
    assert 0 < folded["gap_95"] < 0.1
    assert folded["tokens_ratio"] == pytest.approx(1, abs=0.1)  # the same batches, nearly the same losses
    speed = bf16["step_ms"] / folded["step_ms"] / folded["tokens_ratio"]
    assert folded["loss_matched_speedup"] == pytest.approx(speed)
    for moment in ("start", "end"):
        assert 0.9 < folded[f"cosine_layer_{moment}"] < folded[f"cosine_{moment}"] < 1
    assert folded["cosine_start"] != folded["cosine_end"]
    gaps = compare.gap_curves(out, rows)
    assert list(gaps) == ["folded"] and len(gaps["folded"]) == 4
    results.Result(kind="parity", date="2026-11-21", hardware="x", versions={}, command="c", rows=tuple(rows))


def test_seeds_without_bf16_have_no_evidence(tmp_path):
    rows = [{"recipe": "folded", "seed": 1}, {"recipe": "bf16", "seed": 0}]
    assert compare.add_evidence(rows, tmp_path) == rows


def test_a_study_goes_on_where_it_stopped(study, small_corpus, tmp_path):
    rows, _, out = study
    shutil.copytree(out, tmp_path / "runs")
    (tmp_path / "runs" / "bf16-1" / "summary.json").unlink()
    lines = []
    again = run_all(compare.jobs(["bf16"], [0, 1]), small_corpus, out=tmp_path / "runs", report=lines.append)
    assert again[0] == rows[0] and again[1]["heldout_loss"] == rows[2]["heldout_loss"]
    assert [line for line in lines if "started" in line] == ["bf16-1: started"]


def test_a_directory_of_another_study_is_refused(study, small_corpus):
    with pytest.raises(ConfigError, match="another directory"):
        run_all(compare.jobs(["bf16"], [0]), [*small_corpus, "--lr", "1e-4"], out=study[2])


def test_a_failed_run_is_named_with_its_reason(small_corpus, tmp_path):
    with pytest.raises(RunError, match=r"foldd-0: exit code 2.*Did you mean 'folded'"):
        run_all(compare.jobs(["foldd"], [0]), small_corpus, out=tmp_path / "runs")


def test_model_names():
    assert model_name("llama", 129_100_000) == "llama-129m"
    assert model_name("gpt", 27_400) == "gpt-27k"
