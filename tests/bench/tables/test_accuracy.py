from __future__ import annotations

from octavo_bench.demo import KIND as DEMO


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
