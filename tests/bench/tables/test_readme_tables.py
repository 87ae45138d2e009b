"""The README's headline and results, from results whose figures are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo_bench import ladder, readme, results

MakeResult = Callable[..., results.Result]


def step(implementation: str, ms: float, gib: float, workload: str = readme.BLOCKS) -> dict[str, Any]:
    return {
        "workload": workload,
        "implementation": implementation,
        "ms": ms,
        "ratio_to_bf16": 200 / ms,
        "peak_gib": gib,
    }


@pytest.fixture
def directory(tmp_path: Path, result: MakeResult) -> Path:
    steps = [step("bf16", 200, 20), step(readme.TORCHAO, 150, 15), step(readme.FOLDED, 100, 18)]
    engines = [step("transformer engine current", 170, 19), step("transformer engine delayed", 160, 19)]
    results.write(result("step", *steps, *engines), tmp_path)
    losses = ((0, "bf16", 2.0), (0, "folded", 2.02), (1, "bf16", 2.0), (1, "folded", 1.98), (2, "bf16", 9.0))
    rows = [
        {"model": "llama-3m", "tokens": 10**6, "recipe": r, "seed": s, "heldout_loss": x, "step_ms": 1.0}
        for s, r, x in losses
    ]
    results.write(result("parity", *rows), tmp_path)
    return tmp_path


def test_the_headline_says_the_gains_and_the_costs(directory: Path) -> None:
    text = readme.headline(directory)
    assert "**2.00 times the speed of BF16**, beside torchao's 1.33 and Transformer Engine's 1.25: Llama-3-8B" in text
    assert "**Held-out loss +0.00 % ± 12.71 % (95 % over 2 seeds) beside BF16**: a Llama of 3 M parameters" in text
    assert "**What it costs**: 18.0 GiB where torchao takes 15.0 and Transformer Engine 19.0." in text
    assert len(text.splitlines()) == 3  # nothing of what was not measured


def test_losses_are_compared_over_the_seeds_of_both(directory: Path) -> None:
    text = readme.summary(directory)
    assert "| held-out loss, 3 M parameters, 1 M tokens | 2.0000 |  |  | 2.0000 | +0.00 % ± 12.71 %, 2 seeds |" in text
    assert "| Llama-3-8B blocks, ms per step, `folded` | 200.0 | 150.0 | 160.0 | 100.0 | 2.00 x |" in text
    assert "<details>" in text and "  octavo x" in text


def test_a_step_that_the_newest_session_lacks_comes_from_the_newest_that_has_it(
    directory: Path, result: MakeResult
) -> None:
    older = [step("bf16", 300, 20), step(readme.FAST, 250, 20), step(readme.FOLDED, 200, 20)]
    results.write(replace(result("step", *older), date="2026-11-01"), directory)
    text = readme.summary(directory)
    assert "| Llama-3-8B blocks, ms per step, `folded` | 200.0 | 150.0 | 160.0 | 100.0 | 2.00 x |" in text
    assert "| Llama-3-8B blocks, ms per step, `folded_fast` | 300.0 |  |  | 250.0 | 0.80 x |" in text
    assert "2026-11-01-" in text  # its commands, too


def test_pairs_of_the_parity_study_come_before_those_of_two_seeds(directory: Path, result: MakeResult) -> None:
    study = {"protocol": ladder.PROTOCOL, "model": "llama-4m", "tokens": 70_000_000, "condition": "half"}
    changed = "folded+policy.memory=low"

    def run(recipe: str, seed: int, loss: float) -> dict[str, Any]:
        own = {"recipe": recipe, "seed": seed, "text": "t", "machine": "m", "heldout_loss": loss, "fresh_loss": loss}
        return study | own | {"training_loss": [loss]}

    blocks = [
        run(recipe, seed, loss + seed / 1e4 * (recipe == "folded"))
        for seed in range(6)
        for recipe, loss in (("bf16", 1.0), ("bf16 + 1 ulp", 1.0), ("folded", 1.001))
    ]
    others = [row | {"model": "moe-9m", "tokens": 10**9} for row in blocks] + [run(changed, 0, 3.0)]
    results.write(result("ladder", *blocks, *others), directory)
    found = ladder.gaps(blocks)[-1]
    gap = f"{found.mean:+.2f} % ± {found.half_width:.2f} %"
    line = (
        f"Training loss over the last fifth, FP8 from half of the run on, {gap} (95 % over 6 pairs) beside BF16**: a Ll"
    )
    assert line in readme.headline(directory)
    text = readme.summary(directory)
    assert f"| training loss over the last fifth, 4 M parameters, 70 M tokens | 1.0000 |  |  | 1.0012 | {gap}" in text
    assert "| held-out loss, 3 M parameters" in text and "-ladder.json" in text


def test_experts_are_beside_the_fastest_bf16(directory: Path, result: MakeResult) -> None:
    def row(implementation: str, ms: float, kept: float, codes: float) -> dict[str, Any]:
        ratio = {"ratio_to_bf16": 15.0 / ms, "kept_mib": kept, "kept_weight_codes_mib": codes}
        return {"workload": "8 x 8", "implementation": implementation, "ms": ms, **ratio}

    trainer = {"workload": "the Trainer", "implementation": "bf16", "ms": 1.0, "ratio_to_bf16": 1.0}
    layer = row("bf16 x", 20, 100, 0), row("bf16 x, compiled", 15, 100, 0), row(readme.FOLDED, 10, 30, 20)
    results.write(result("moe", *layer, trainer), directory)
    line = "| experts, 8 x 8, ms, `folded` | 15.0 |  |  | 10.0 | 1.50 x, -50 % kept for backward |"
    assert line in readme.summary(directory)


def test_without_results_nothing_is_said(tmp_path: Path) -> None:
    assert readme.headline(tmp_path) == ""


def test_a_bounded_interval_of_the_parity_study_comes_first(directory: Path, result: MakeResult) -> None:
    keys = {"protocol": 2, "model": "llama-7m", "tokens": 2 * 10**6, "condition": "whole", "text": "t", "machine": "m"}
    losses = {"bf16": 2.0, "bf16 + 1 ulp": 2.0, "folded": 2.002}
    rows = [
        {**keys, "seed": seed, "recipe": arm, "heldout_loss": loss * (1 + 1e-4 * (seed % 2))}
        for seed in range(12)
        for arm, loss in losses.items()
    ]
    results.write(result("ladder", *rows), directory)
    assert "a Llama of 3 M parameters" not in readme.headline(directory)
    assert "**Held-out loss +0.10 % ± 0.00 % (95 % over 12 pairs) beside BF16**" in readme.headline(directory)
