from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo_bench.compare import KIND, by_recipe
from octavo_bench.demo import KIND as DEMO


def loss(recipe: str, seed: int, value: float, model: str = "124m") -> dict[str, Any]:
    return {"model": model, "tokens": 1000, "recipe": recipe, "seed": seed, "heldout_loss": value}


def test_parity_states_means_gaps_and_the_spread_of_bf16() -> None:
    rows = [loss("bf16", 0, 2.0), loss("bf16", 1, 2.02), loss("folded", 0, 2.03), loss("folded", 1, 2.05)]
    text = by_recipe(rows)
    assert "| bf16 | 2.0000 | 2.0200 | 2.0100 |  |  |" in text
    # Gaps of 1.5 % and 1.485149 %: mean 1.492574, spread 0.010502, 12.706 standard errors of 0.007426.
    assert "| folded | 2.0300 | 2.0500 | 2.0400 | +1.49 % | ± 0.09 % |" in text
    assert "2 BF16 seeds lie 0.0200 apart (1.00 %)" in text and "12.7 standard errors with 2 seeds" in text
    assert "tokens to equal loss" not in text and "over sequences" not in text


def test_parity_shows_evidence_where_there_is_some() -> None:
    evidence = {"gap": 0.02, "gap_95": 0.01, "tokens_ratio": 1.02, "loss_matched_speedup": 1.234}
    evidence |= {"cosine_start": 0.99, "cosine_layer_start": 0.9, "cosine_end": 0.95, "cosine_layer_end": 0.8}
    more = {**evidence, "gap_95": 0.03, "tokens_ratio": 1.04}
    rows = [loss("bf16", 0, 2.0), loss("bf16", 1, 2.0)]
    rows += [loss("folded", 0, 2.0) | evidence, loss("folded", 1, 2.0) | more, loss("block", 0, 2.0)]
    text = by_recipe(rows)
    assert "| 95 % over sequences | tokens to equal loss | speed at equal loss | gradient cosine, start |" in text
    assert "| +0.00 % | ± 0.00 % | ± 1.000 % | 1.030 | 1.23 | 0.9900 | 0.9000 | 0.9500 | 0.8000 |" in text
    assert "| block | 2.0000 |  | 2.0000 | +0.00 % |  |  |  |  |  |  |  |  |" in text
    assert "whether these very weights differ" in text and "ended higher" in text


def test_parity_keeps_models_apart_and_leaves_missing_seeds_empty() -> None:
    rows = [loss("bf16", 0, 2.0), loss("bf16", 1, 2.2), loss("folded", 1, 2.1), loss("folded", 0, 9.0, "1b")]
    small, large = by_recipe(rows).split("**1b")
    assert "| folded |  | 2.1000 | 2.1000 | -4.55 % |  |" in small  # to BF16 of the same seed
    assert "BF16 not measured" in large and "0 seeds" in large


def test_one_seed_of_one_recipe_stands_once() -> None:
    with pytest.raises(ConfigError, match="folded, seed 0 occurs twice"):
        KIND.markdown([loss("folded", 0, 2.0), loss("folded", 0, 2.1)])


def test_demo_shows_both_losses_and_the_gap() -> None:
    row = {
        "recipe": "folded",
        "device": "cpu",
        "steps": 300,
        "tokens": 614400,
        "heldout_loss_fp8": 1.61,
        "heldout_loss_bf16": 1.6,
        "gap_percent": 0.625,
    }
    line = "| cpu | folded | 300 | 614,400 | 1.6100 | 1.6000 | +0.62 % |"
    assert f"{line}  |  |" in DEMO.markdown([row])
    history = [{"step": step, "gap_percent": (-1) ** step / 2} for step in range(20)]
    more = {"unigram_entropy": 3.2, "history": [*history, {"step": 20}]}
    assert f"{line} ± 1.58 % | 3.2000 |" in DEMO.markdown([row | more])
