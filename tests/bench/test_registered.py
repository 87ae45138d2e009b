"""The registered studies: what is shown of them, and that their arms are those that a session can run."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo_bench import ladder, registered, results
from octavo_bench.ladder import SIZES, under
from octavo_bench.lanes import BF16, CONTROL, recipe_of
from octavo_bench.results import Row


def block(seed: int, **losses: float) -> list[Row]:
    """Return the runs of a block of `3m` under *half*, whose decisive losses are given by arm."""
    training = under("half", SIZES["3m"])
    study = {"protocol": ladder.PROTOCOL, "model": ladder.model_name_of(training), "tokens": training.tokens}
    common = study | {"condition": "half", "seed": seed, "text": "t", "machine": "m"}
    names = {"bf16": BF16, "control": CONTROL, "narrow": "rotated+fprop.*.rotation=64"}
    return [
        common | {"recipe": names.get(name, name), "fresh_loss": loss, "heldout_loss": loss}
        for name, loss in losses.items()
    ]


def test_an_arm_is_compared_with_rotated_in_the_blocks_that_have_both(tmp_path: Path) -> None:
    rows = [
        *block(0, bf16=1.0, control=1.0, rotated=1.01, narrow=1.03),
        *block(1, bf16=1.0, control=1.0, narrow=1.02),
    ]
    results.write(results.made_today(ladder.NAME, rows, "octavo bench parity", device="cpu"), tmp_path)
    line = registered.results_table(tmp_path).splitlines()[-1]
    assert [cell.strip() for cell in line.split("|")[4:9]] == [
        "`rotated+fprop.*.rotation=64`",
        "2",
        "+2.500 %",
        "inconclusive",
        "+2.000 %",
    ]


def test_no_result_makes_no_table(tmp_path: Path) -> None:
    assert not registered.results_table(tmp_path)


@pytest.mark.parametrize("study", registered.ARMS)
def test_arms_with_results_are_of_registered_studies(study: str) -> None:
    page = (Path(__file__).parents[2] / "docs/explanation/parity-protocol.md").read_text()
    assert f"\n| {study} |" in page.split("parity-registered -->")[1].split("<!-- end -->")[0]
    for size, condition in registered.ARMS[study]:
        assert under(condition, SIZES[size])
        assert all(recipe_of(arm) for arm in registered.ARMS[study][size, condition] if "emulate" not in arm)
