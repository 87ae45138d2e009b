"""The parity bench runs each recipe and seed in a process of its own and reads back what came out."""

import pytest

from octavo.bench import parity
from octavo.errors import ConfigError, RunError

TINY = ["--preset", "tiny", "--steps", "4", "--device", "cpu"]


@pytest.fixture(autouse=True)
def small_corpus(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(12):
        (text / f"{i}.txt").write_text(f"the quick brown fox number {i} jumps over the lazy dog.\n" * 60)
    return [*TINY, "--source", str(text), "--cache", str(tmp_path / "cache")]


def test_one_row_for_each_recipe_and_seed(small_corpus, tmp_path):
    lines = []
    rows = parity.run_parity(
        small_corpus, ["bf16", "folded"], [0, 1], out=tmp_path / "runs", slots=2, report=lines.append
    )
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
    curves = parity.curves(tmp_path / "runs", ["bf16", "folded"], [0, 1])
    assert curves[0]["steps"][-1] == 4 and len(curves[0]["loss"]) == len(curves[0]["steps"])
    assert curves[0]["loss"][0] == pytest.approx(curves[1]["loss"][0], rel=0.01)  # same weights, same first batch


def test_a_study_goes_on_where_it_stopped(small_corpus, tmp_path):
    out, lines = tmp_path / "runs", []
    first = parity.run_parity(small_corpus, ["bf16"], [0], out=out, report=lines.append)
    both = parity.run_parity(small_corpus, ["bf16"], [0, 1], out=out, report=lines.append)
    assert both[0] == first[0]
    assert [line for line in lines if "started" in line] == ["bf16 seed 0: started", "bf16 seed 1: started"]


def test_a_directory_of_another_study_is_refused(small_corpus, tmp_path):
    parity.run_parity(small_corpus, ["bf16"], [0], out=tmp_path)
    with pytest.raises(ConfigError, match="another directory"):
        parity.run_parity([*small_corpus, "--lr", "1e-4"], ["bf16"], [0], out=tmp_path)


def test_a_failed_run_is_named_with_its_reason(small_corpus, tmp_path):
    with pytest.raises(RunError, match=r"foldd seed 0: exit code 2.*Did you mean 'folded'"):
        parity.run_parity(small_corpus, ["foldd"], [0], out=tmp_path / "runs")


def test_model_names():
    assert parity.model_name("llama", 129_100_000) == "llama-129m"
    assert parity.model_name("gpt", 27_400) == "gpt-27k"
