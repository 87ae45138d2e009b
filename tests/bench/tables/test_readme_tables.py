"""The README's headline and results, from results whose figures are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo_bench import ladder, readme, results
from octavo_bench.implementations import ONCE

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
    assert (
        "**2.00 times the speed of BF16** with recipe `folded` on one H200"
        " (torchao 1.33, Transformer Engine 1.25): Llama-3-8B blocks, BF16 weights, compiled.\n" in text
    )
    loss = "**Loss +0.00 % ± 12.71 % relative to BF16** with recipe `folded`: 2 pairs of a Llama of 3 M parameters on"
    assert f"{loss} 1 M tokens." in text
    assert "**Where it loses**: Llama-3-8B blocks take 18.0 GiB (torchao 15.0, Transformer Engine 19.0)." in text
    assert len(text.splitlines()) == 3  # nothing of what was not measured


def test_losses_are_compared_over_the_seeds_of_both(directory: Path) -> None:
    line = "| held-out loss, 3 M parameters, 1 M tokens | 2.0000 | 2.0000 | `folded` | +1.00 %, -1.00 % | 2 seeds |"
    assert line in readme.losses(directory)
    assert "| Llama-3-8B blocks |  | 1.33 x | 1.25 x |  | 2.00 x |  |" in readme.speed(directory)


def test_a_step_that_the_newest_session_lacks_comes_from_the_newest_that_has_it(
    directory: Path, result: MakeResult
) -> None:
    older = [step("bf16", 300, 20), step(readme.FAST, 250, 20), step(readme.FOLDED, 200, 20)]
    results.write(replace(result("step", *older), date="2026-11-01"), directory)
    assert "| Llama-3-8B blocks |  | 1.33 x | 1.25 x |  | 2.00 x | 0.80 x, `folded_fast` |" in readme.speed(directory)


def test_pairs_of_the_parity_study_come_before_those_of_two_seeds(directory: Path, result: MakeResult) -> None:
    study = {"protocol": ladder.PROTOCOL, "model": "llama-4m", "tokens": 70_000_000, "condition": "half"}
    changed = "folded+policy.memory=low"

    def run(recipe: str, seed: int, loss: float) -> dict[str, Any]:
        own = {"recipe": recipe, "seed": seed, "text": "t", "machine": "m", "heldout_loss": loss, "fresh_loss": loss}
        return study | own | {"training_loss": [loss]}

    blocks = [
        run(recipe, seed, loss + seed / 1e4 * (recipe == "folded"))
        for seed in range(6)
        for recipe, loss in (("bf16", 1.0), ("bf16 + 1 ulp", 1.0), ("folded", 1.001), (ladder.SUMMARY[2], 1.0001))
    ]
    others = [row | {"model": "moe-9m", "tokens": 10**9} for row in blocks] + [run(changed, 0, 3.0)]
    results.write(result("ladder", *blocks, *others), directory)
    found = next(gap for gap in ladder.gaps(blocks) if gap.arm == "folded")
    gap = f"{found.mean:+.2f} % ± {found.half_width:.2f} %"
    line = f"**Loss {gap} relative to BF16** with recipe `folded`: 6 pairs of a Llama of 4 M parameters on 70 M tokens"
    assert f"{line}, in eight bits from half of" in readme.headline(directory)
    text = readme.losses(directory)
    name = "| training loss over the last fifth, 4 M parameters, 70 M tokens"
    assert f"{name} | 1.0000 | 1.0012 | `folded` | {gap} | 6 pairs on" in text
    remedy = "`folded`, last three tenths with fprop in BF16 | +0.01 % ± 0.00 % | 6 pairs on"
    assert f"| the same, in other pairs | 1.0000 | 1.0001 | {remedy}" in text
    assert "| held-out loss, 3 M parameters" in text


def test_a_session_without_the_other_libraries_hides_none_with_them(directory: Path, result: MakeResult) -> None:
    before = readme.headline(directory), readme.speed(directory)
    few = result("step", step("bf16", 200, 20), step(readme.FOLDED, 50, 18), step("octavo delayed", 90, 18))
    results.write(replace(few, date="2026-11-22"), directory)
    assert (readme.headline(directory), readme.speed(directory)) == before
    more = [step("bf16", 200, 20), step(readme.TORCHAO, 160, 15), step(readme.FOLDED, 80, 18)]
    more += [step("transformer engine current", 125, 19), step(readme.FAST, 80, 18)]
    results.write(replace(result("step", *more), date="2026-11-23"), directory)
    assert "| Llama-3-8B blocks |  | 1.25 x | 1.60 x |  | 2.50 x | 2.50 x, `folded_fast` |" in readme.speed(directory)


def test_other_machines_are_not_among_those_of_readme(directory: Path, result: MakeResult) -> None:
    before = readme.headline(directory), readme.speed(directory)
    slower = [step("bf16", 200, 20), step(readme.TORCHAO, 180, 15), step(readme.FOLDED, 190, 18)]
    slower += [step("transformer engine current", 170, 19), step(readme.FAST, 180, 18)]
    results.write(replace(result("step", *slower), date="2026-12-01", hardware="nvidia-h100"), directory)
    assert (readme.headline(directory), readme.speed(directory)) == before


def test_sharded_steps_are_beside_those_over_as_many_ranks(directory: Path, result: MakeResult) -> None:
    def sharded(ranks: int, implementation: str, ratio: float, gib: float) -> dict[str, Any]:
        row = {"workload": "llama-3-8b", "layout": "data", "ranks": ranks, "implementation": implementation}
        return row | {"tokens_per_s_per_gpu": 1.0, "ratio_to_bf16": ratio, "peak_gib": gib, "wire_bytes": 1}

    four = (
        sharded(4, "bf16", 1, 40),
        sharded(4, f"{readme.TORCHAO}, FP8 gather", 1.9, 30),
        sharded(4, readme.FOLDED, 3, 9),
    )
    two = sharded(2, "bf16", 1, 80), sharded(2, readme.FOLDED, 1.5, 60)
    two += (sharded(2, f"{readme.FOLDED}{ONCE}", 9, 70),)  # beside a BF16 that gathers twice
    results.write(replace(result("distributed", *four), date="2026-11-20"), directory)
    results.write(result("distributed", *two), directory)
    row = "| Llama-3-8B, FSDP2, 2 GPUs | 1 tokens/s per GPU |  |  |  | 1.50 x | 1.50 x, `folded` |"
    assert row in readme.speed(directory)
    assert "| Llama-3-8B, FSDP2, per GPU | 80.0 GiB | 60.0 GiB | -25 % | `folded` |" in readme.memory(directory)


def test_experts_are_beside_the_fastest_bf16(directory: Path, result: MakeResult) -> None:
    def row(implementation: str, ms: float, kept: float, codes: float) -> dict[str, Any]:
        ratio = {"ratio_to_bf16": 15.0 / ms, "kept_mib": kept, "kept_weight_codes_mib": codes}
        return {"workload": "8 x 8", "implementation": implementation, "ms": ms, **ratio}

    trainer = {"workload": "the Trainer", "implementation": "bf16", "ms": 1.0, "ratio_to_bf16": 1.0}
    layer = row("bf16 x", 20, 100, 0), row("bf16 x, compiled", 15, 100, 0), row(readme.FOLDED, 10, 30, 20)
    results.write(result("moe", *layer, trainer), directory)
    assert "| layer of experts, 8 x 8 |  |  |  |  | 1.50 x |  |" in readme.speed(directory)
    kept = "| layer of experts, kept for backward | 0.1 GiB | 0.0 GiB | -50 % | `folded` |"
    assert kept in readme.memory(directory)


def test_the_default_recipe_comes_first_where_it_was_measured(directory: Path, result: MakeResult) -> None:
    more = [
        step("bf16", 200, 20),
        step(readme.TORCHAO, 150, 15),
        step(readme.FOLDED, 100, 18),
        step(readme.OWN, 160, 18),
    ]
    results.write(replace(result("step", *more), date="2026-11-23"), directory)
    assert "1.25 times the speed of BF16** with recipe `rotated`" in readme.headline(directory)
    assert "| 1.25 x | 2.00 x |" in readme.speed(directory)


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
    assert "**Loss +0.10 % ± 0.00 % relative to BF16** with recipe `folded`: 12 pairs" in readme.headline(directory)
