"""Pictures are newer than their data, and show what the results say."""

from __future__ import annotations

import html
import json
import shutil
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo_bench import ladder, pictures, readme, results

ROOT = Path(__file__).parents[2]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a copy of the committed results and of the manifest."""
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "pictures" / "manifest.json", tmp_path / "docs" / "pictures")
    return tmp_path


def change(path: Path, key: str, by: float) -> None:
    """Multiply a figure in every row of a result."""
    content = json.loads(path.read_text())
    for row in content["rows"]:
        if key in row:
            row[key] *= by
    path.write_text(json.dumps(content))


def test_the_committed_pictures_are_current() -> None:
    assert pictures.outdated(ROOT) == []


def test_a_new_figure_makes_its_picture_old_and_no_other(repository: Path) -> None:
    change(repository / "benchmarks" / "results" / "2026-11-23-nvidia-h200-step.json", "ratio_to_bf16", 1.01)
    assert pictures.outdated(repository) == ["hero"]
    assert pictures.command(check=True, root=repository) == 1


def test_new_code_makes_a_picture_old(repository: Path, tmp_path: Path) -> None:
    source = tmp_path / "console.py"
    source.write_text("1")
    picture = pictures.Picture(data=lambda _: 0, sources=[source], draw=lambda *_: None)
    before = picture.digest(repository)
    assert picture.digest(repository) == before
    source.write_text("2")
    assert picture.digest(repository) != before


def test_the_bars_are_those_of_the_newest_result_fastest_last() -> None:
    data = pictures.hero_data(ROOT / "benchmarks" / "results")
    every = results.every("step", ROOT / "benchmarks" / "results")
    steps = (result.rows for result in every if result.hardware == readme.MACHINE)
    step = next(rows for rows in steps if any(row["workload"] == readme.BLOCKS for row in rows))
    speeds = {row["implementation"]: row["tokens_per_s"] for row in step if row["workload"] == readme.BLOCKS}
    shown = {bar["implementation"]: bar["tokens_per_s"] for bar in data["bars"]}
    here = {name: speed for name, speed in shown.items() if readme.ELSEWHERE not in name}
    assert here == {name: speeds[name] for name in here} and {"bf16", "octavo folded", readme.OWN} <= set(here)
    assert any(name.startswith(readme.ENGINE) for name in shown)
    ratios = [bar["ratio_to_bf16"] for bar in data["bars"]]
    assert ratios == sorted(ratios)


def test_the_curves_are_those_of_the_largest_llama_of_the_parity_study(repository: Path) -> None:
    directory = repository / "benchmarks" / "results"
    found = pictures.curves(directory)
    rows = [row for row in ladder.read_rows(directory) if row["model"] == "llama-129m" and "training_loss" in row]
    lanes = {(row["seed"], row["condition"], row["recipe"]): row["training_loss"] for row in rows}
    pair = next(key for key, losses in lanes.items() if losses == found["fp8"]["loss"])
    assert found["model"] == "llama-129m" and pair[2] == found["recipe"] == ladder.DEFAULT
    assert found["bf16"]["loss"] == lanes[(*pair[:2], "bf16")] != found["fp8"]["loss"]
    tokens = next(row["tokens"] for row in rows if row["condition"] == pair[1])
    assert 0 < found["bf16"]["tokens"][0] < found["bf16"]["tokens"][-1] < tokens
    assert "pairs; eight bits from half on" in found["gap"]
    for path in directory.glob("*ladder.json"):
        path.unlink()
    assert "demo" in pictures.curves(directory)["model"]


def test_the_terminal_shows_what_the_run_printed(tmp_path: Path) -> None:
    data = pictures.terminal_data(ROOT / "benchmarks" / "results")
    assert f"{data['row']['heldout_loss_fp8']:.4f}" in data["text"] and "held-out loss FP8" in data["text"]
    assert max(map(len, data["text"].splitlines())) <= pictures.WIDTH
    assert ("slower than BF16 here" in data["text"]) == (data["row"]["peak_gib"] is None)
    pictures.draw_terminal(data, tmp_path, tmp_path)
    for drawn in (tmp_path, ROOT / "docs" / "pictures"):
        shown = html.unescape((drawn / "terminal.svg").read_text()).replace("\xa0", " ")
        assert all(line.strip() in shown for line in data["text"].splitlines() if line.isascii())


def test_the_dashboard_is_pictured_on_a_run_that_is_a_result(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"heldout_loss_fp8": 1.0}')
    data = pictures.dashboard_data(ROOT / "benchmarks" / "results")
    with pytest.raises(ConfigError, match="not the smallest demo"):
        pictures.draw_dashboard(data, tmp_path, tmp_path)
