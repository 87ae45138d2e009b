"""Gaps, verdicts and intervals of the parity ladder, and what an interval at any time promises."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import ConfigError
from octavo_bench import ladder, ladder_plots, results, spreads
from octavo_bench.evidence import at_any_time, errors_at_any_time, fit, student
from octavo_bench.lanes import BF16, CONTROL
from octavo_bench.results import Row

STUDY = {
    "protocol": ladder.PROTOCOL,
    "model": "llama-1m",
    "tokens": 1000,
    "condition": "half",
    "text": "t",
    "machine": "m",
}


def run(recipe: str, seed: int, loss: float, **changes: Any) -> Row:
    losses = {"heldout_loss": 2 * loss, "fresh_loss": loss, "training_loss": [3.0, 2.0], "seconds": 1.0}
    return STUDY | {"recipe": recipe, "seed": seed} | losses | changes


def block(seed: int, **losses: float) -> list[Row]:
    names = {"bf16": BF16, "control": CONTROL}
    return [run(names.get(name, name), seed, loss) for name, loss in losses.items()]


def test_a_recipe_is_compared_with_the_mean_of_both_bf16_runs() -> None:
    rows = [*block(0, bf16=1.0, control=1.02, folded=1.0201), *block(1, bf16=1.0, control=1.0, folded=0.999)]
    control, folded = ladder.gaps(rows)
    assert control.differences == pytest.approx((2.0, 0.0))
    assert folded.differences == pytest.approx((1.0, -0.1))


def test_the_mean_of_the_recipes_takes_blocks_that_have_all_of_them() -> None:
    rows = [*block(0, bf16=1.0, control=1.0, folded=1.01, block=1.03), *block(1, bf16=1.0, control=1.0, folded=2.0)]
    _, mean, folded, _ = ladder.gaps(rows)
    assert mean.arm == ladder.ALL and mean.differences == pytest.approx((2.0,))
    assert len(folded.differences) == 2


def test_changed_recipes_are_not_in_the_mean() -> None:
    name = "folded+policy.memory=low"
    rows = [*block(0, bf16=1.0, control=1.0, folded=1.01, block=1.03), run(name, 0, 9.0)]
    rows += [*block(1, bf16=1.0, control=1.0, folded=1.01), run(name, 1, 2.0)]
    found = {gap.arm: gap.differences for gap in ladder.gaps(rows)}
    assert found[ladder.ALL] == pytest.approx((2.0,)) and found[name] == pytest.approx((800.0, 100.0))
    assert len(found["folded"]) == 2 and len(ladder.studies(rows)) == 1


@pytest.mark.parametrize("other", ["rotated", "rotated_fast", "rowwise_bf16_fprop"])
def test_recipes_of_another_forward_are_not_in_the_mean_and_displace_none(other: str) -> None:
    rows = [*block(0, bf16=1.0, control=1.0, folded=1.01, block=1.03), *block(1, bf16=1.0, control=1.0, folded=1.01)]
    rows += [run(other, seed, 5.0) for seed in (0, 1)]
    found = {gap.arm: gap.differences for gap in ladder.gaps(rows)}
    assert found[ladder.ALL] == pytest.approx((2.0,)) and found[other] == pytest.approx((400.0, 400.0))
    beside = [*block(0, bf16=1.0, control=1.0, folded=1.01), run(other, 0, 1.0)]
    assert ladder.ALL not in [gap.arm for gap in ladder.gaps(beside)]


def test_skewed_pairs_are_flagged_and_keep_their_verdict() -> None:
    normal = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06)
    cells = {
        "symmetric": ladder.Gap("folded", normal, 0),
        "one outlier": ladder.Gap("folded", (*normal, 0.6), 0),
        "four pairs": ladder.Gap("folded", (0.01, 0.01, 0.01, 0.6), 0),
        "equal": ladder.Gap("folded", (0.02,) * 6, 0),
        "control": ladder.Gap(CONTROL, (*normal, 0.6), 0),
    }
    assert {name: gap.is_skewed for name, gap in cells.items()} == dict.fromkeys(cells, False) | {
        "one outlier": True, "control": True
    }  # fmt: skip
    assert cells["one outlier"].flagged_verdict == f"{cells['one outlier'].verdict}, skewed"
    assert cells["symmetric"].flagged_verdict == cells["symmetric"].verdict == "passes"
    assert cells["control"].flagged_verdict == "skewed"
    rows = [row for seed, gap in enumerate(cells["one outlier"].differences)
            for row in block(seed, bf16=1.0, control=1.0, folded=1 + gap / 100)]  # fmt: skip
    assert "skewed |" in ladder.report(rows)


def test_the_bound_of_skewness_is_that_of_normal_pairs() -> None:
    draws = np.random.default_rng(0).normal(size=(4000, 12))
    flagged = np.mean([ladder.Gap("folded", tuple(own), 0).is_skewed for own in draws])
    assert 0.02 < flagged < 0.07


def test_blocks_of_several_versions_of_the_code_are_pooled_and_said() -> None:
    rows = [*block(0, bf16=1.0, control=1.0, folded=1.0), *block(1, bf16=1.0, control=1.0, folded=1.0)]
    assert "Blocks by code" not in ladder.report(rows)
    newer = [*rows, *({**row, "package": "abc"} for row in block(2, bf16=1.0, control=1.0, folded=1.0))]
    assert "Blocks by code: 2 of unrecorded code, 1 of abc." in ladder.report(newer)


def test_two_recipes_are_compared_in_the_blocks_that_have_both(tmp_path: Path) -> None:
    assert ladder.post_hoc_table(tmp_path) == ""
    rows = [
        {**row, "condition": "whole"}
        for seed, folded in enumerate((1.01, 1.03))
        for row in [*block(seed, bf16=1.0, control=1.0, folded=folded), run(ladder.REMEDY[1], seed, 1.0)]
    ]
    rows += [{**row, "condition": "whole"} for row in block(2, bf16=1.0, control=1.0, folded=9.0)]
    results.write(results.made_today(ladder.NAME, rows, "octavo bench parity"), tmp_path)
    assert "| whole | llama-1m | 2 | +2.000 % |" in ladder.post_hoc_table(tmp_path)


def test_a_model_served_in_fp8_is_beside_one_trained_in_bf16_and_quantised() -> None:
    """Both of its losses are the recipe's: what its forward pass costs is in both."""
    crossed = {"heldout_bf16_loss": 2.002, "heldout_of_bf16_loss": 2.01}
    rows = [*block(0, bf16=1.0, control=1.0), run("folded", 0, 1.01, **crossed)]
    [gap] = ladder.served(rows)
    assert gap.arm == "folded" and gap.differences == pytest.approx((100 * (2.02 / 2.01 - 1),))
    assert "| folded | +1.000 % | +0.100 % | +0.500 % | +0.498 % | inconclusive |" in ladder.report(rows)
    assert "FP8 model, in BF16" not in ladder.report(block(0, bf16=1.0, control=1.0, folded=1.01))
    failed = {"error": "the loss was not finite at step 3"}
    diverged = [*block(1, bf16=1.0, control=1.0), STUDY | {"recipe": "folded", "seed": 1} | failed]
    assert [gap.verdict for gap in ladder.served([*rows, *diverged])] == ["fails: diverged"]
    lost = [run(BF16, 2, 1.0) | failed, run(CONTROL, 2, 1.0), run("folded", 2, 1.01)]  # BF16's weights are of no use
    assert ladder.served([*rows, *lost]) == [gap]


def test_the_fresh_loss_decides_where_all_runs_have_it() -> None:
    rows = block(0, bf16=1.0, control=1.0, folded=1.01)
    assert ladder.decisive(rows) == "fresh_loss"
    del rows[1]["fresh_loss"]
    assert ladder.decisive(rows) == "heldout_loss"
    assert ladder.gaps(rows)[1].differences == pytest.approx((1.0,))


def test_a_block_without_a_finite_baseline_is_left_out_and_a_diverged_recipe_fails() -> None:
    failed = {"error": "the loss was not finite at step 3"}
    lost = [run(BF16, 0, 1.0), run(CONTROL, 0, 1.0) | failed, run("folded", 0, 9.0)]
    diverged = [*block(1, bf16=1.0, control=1.0), STUDY | {"recipe": "folded", "seed": 1} | failed]
    fine = block(2, bf16=1.0, control=1.0, folded=1.0)
    folded = ladder.gaps([*lost, *diverged, *fine])[-1]
    assert (folded.differences, folded.failures, folded.verdict) == ((0.0,), 1, "fails: diverged")


def test_gaps_of_several_studies_are_not_pooled() -> None:
    rows = [*block(0, bf16=1.0, control=1.0), run(BF16, 1, 1.0, condition="whole")]
    with pytest.raises(ConfigError, match="one by one"):
        ladder.gaps(rows)
    assert len(ladder.studies(rows)) == 2
    assert ladder.report(rows).count("**llama-1m, 1,000 tokens, ") == 2


@pytest.mark.parametrize(
    ("mean", "spread", "verdict"),
    [
        (0.0, 0.05, "passes"),
        (0.5, 0.05, "fails"),
        (-0.5, 0.05, "fails"),
        (0.12, 0.1, "inconclusive, nonzero"),
        (0.0, 1.0, "inconclusive"),
    ],
)
def test_verdicts(mean: float, spread: float, verdict: str) -> None:
    values = tuple(mean + spread * (-1) ** i for i in range(40))
    assert ladder.Gap("folded", values, 0).verdict == verdict


def test_conditions_join() -> None:
    own = ladder.SIZES["1m"]
    hard = ladder.under("half+lr4+batch4", own)
    assert (hard.branch, hard.lr, hard.batch) == (0.5, 4 * own.lr, 4 * own.batch)
    assert hard.first == hard.steps / 2 and hard.tokens == pytest.approx(own.tokens, rel=0.01)
    assert [ladder.under(name, own).branch for name in ("quarter", "tenth")] == [0.25, 0.1]
    assert ladder.under("half+short", own).tokens == pytest.approx(own.tokens / 4, rel=0.01)
    assert ladder.under("half+short+short", own).tokens == pytest.approx(own.tokens / 16, rel=0.01)
    assert ladder.under("whole", own) == own
    with pytest.raises(ConfigError, match="Did you mean 'outliers'"):
        ladder.under("half+outlier", own)


def test_the_pilot_is_kept_and_not_pooled(tmp_path: Path) -> None:
    old = [row | {"protocol": 1, "pilot": True} for row in block(0, bf16=1.0, control=2.0, folded=3.0)]
    rows = block(100, bf16=1.0, control=1.0, folded=1.0)
    assert ladder.evidence(tmp_path) == ""
    for part in (old, rows):  # one day, one file: neither replaces the other
        results.write(results.made_today(ladder.NAME, part, "octavo bench parity"), tmp_path)
    assert [row["protocol"] for row in ladder.read_rows(tmp_path)] == [ladder.PROTOCOL] * 3
    assert [row["protocol"] for row in ladder.read_rows(tmp_path, pilot=True)] == [1] * 3
    assert "| folded | 1 | +0.000 % |" in ladder.evidence(tmp_path)


# --- intervals -------------------------------------------------------------------------------------------------------


def test_intervals_at_any_time_hold_at_all_times_together() -> None:
    """2,000 studies without a gap, looked at after every pair: 5 % of them at most ever exclude it."""
    draw = np.random.default_rng(0)
    values = draw.normal(0.0, 1.0, (2000, 200))
    looks = np.arange(5, 201)
    sums, squares = values.cumsum(1)[:, looks - 1], (values**2).cumsum(1)[:, looks - 1]
    means = sums / looks
    errors = np.sqrt((squares - looks * means**2) / (looks - 1) / looks)
    any_time = np.array([errors_at_any_time(int(n)) for n in looks])
    once = np.array([student(int(n) - 1) for n in looks])
    assert np.mean((abs(means) > any_time * errors).any(1)) < 0.05
    assert np.mean(abs(means[:, -1]) > (once * errors)[:, -1]) == pytest.approx(0.05, abs=0.015)
    assert np.mean((abs(means) > once * errors).any(1)) > 0.3  # Student's
    first = at_any_time(values[0, :50].tolist())
    assert first.half_width == pytest.approx(any_time[45] * errors[0, 45])
    assert first.mean == pytest.approx(means[0, 45])


@pytest.mark.parametrize(("gap", "wrong"), [(0.1001, "passes"), (0.0999, "fails")])
def test_a_session_that_stops_at_a_verdict_is_seldom_wrong(gap: float, wrong: str) -> None:
    """A gap at the edge of the margin, 300 studies that stop at their first verdict: by chance alone one in forty."""
    draw = np.random.default_rng(3)
    studies, stopped = 300, 0
    for _ in range(studies):
        values = tuple(draw.normal(gap, 0.06, 40).tolist())
        verdicts = (ladder.Gap("folded", values[:n], 0).verdict for n in range(5, 41, 4))
        stopped += next((verdict for verdict in verdicts if verdict in ("passes", "fails")), "") == wrong
    assert 0 < stopped < 0.025 * studies


@pytest.mark.parametrize("kind", ["uniform", "laplace", "standard_t"])
def test_intervals_at_any_time_hold_for_other_symmetric_gaps(kind: str) -> None:
    """Heavy tails and none. A strong skew is another matter, as the protocol says: of lognormal gaps 8 % are missed."""
    shape: dict[str, Any] = {"low": -1.0, "high": 1.0} if kind == "uniform" else {}
    shape |= {"df": 3} if kind == "standard_t" else {}
    assert _ever_missed(getattr(np.random.default_rng(0), kind)(size=(2000, 200), **shape)) < 0.05
    skewed = np.random.default_rng(0).lognormal(0.0, 0.5, (2000, 200)) - math.exp(0.125)
    assert 0.05 < _ever_missed(skewed) < 0.1


def _ever_missed(values: Any) -> float:
    """Return the share of studies (rows) whose interval misses 0 after any number of pairs from five on."""
    looks = np.arange(5, values.shape[1] + 1)
    means = values.cumsum(1)[:, 4:] / looks
    errors = np.sqrt(((values**2).cumsum(1)[:, 4:] - looks * means**2) / (looks - 1) / looks)
    return float(np.mean((abs(means) > np.array([errors_at_any_time(int(n)) for n in looks]) * errors).any(1)))


def test_the_interval_is_where_the_mixture_of_likelihood_ratios_is_20() -> None:
    """Against the integral itself: d over N(0, 1), s over ds / s, by quadrature."""
    values = np.array([0.3, -1.0, 0.8, 2.0, 0.1, 1.4, -0.2, 0.9])
    interval = at_any_time(values.tolist())
    assert interval.half_width is not None
    for edge in (interval.mean - interval.half_width, interval.mean + interval.half_width):
        s = np.exp(np.linspace(-6, 8, 4001))[:, None]
        d = np.linspace(-9, 9, 1801)[None]
        away = values - edge
        total, squares, n = away.sum(), (away**2).sum(), len(values)
        null = -n * np.log(s) - squares / (2 * s**2)
        shifted = np.exp(null + d * total / s - (n + 1) * d**2 / 2) / math.sqrt(2 * math.pi)
        ratio = shifted.sum() * (d[0, 1] - d[0, 0]) / np.exp(null).sum()
        assert ratio == pytest.approx(20, rel=1e-3)


def test_up_to_four_pairs_nothing_is_bounded() -> None:
    assert [errors_at_any_time(n) is None for n in range(7)] == [True] * 5 + [False] * 2
    assert at_any_time([0.1, 0.2]).half_width is None
    pairs = ladder.pairs_for(0.3)
    assert (
        (errors_at_any_time(pairs) or 9) / pairs**0.5 <= 0.3 < (errors_at_any_time(pairs - 3) or 9) / (pairs - 3) ** 0.5
    )


# --- spreads ---------------------------------------------------------------------------------------------------------


def test_spreads_within_blocks_and_what_half_way_explains() -> None:
    draw = np.random.default_rng(1)
    rows = []
    for seed in range(60):
        level, early, late = np.exp(draw.normal(0, 0.2)), draw.normal(0, 0.01, 7), draw.normal(0, 0.002, 7)
        for arm in range(7):
            curve = [level * math.exp(early[arm] + (late[arm] if at >= 20 else 0)) for at in range(40)]
            rows.append(run(f"r{arm}", seed, curve[-1], training_loss=curve, heldout_loss=curve[-1]))
    own = spreads.deviations(rows, spreads.heldout)
    assert spreads.spread(own) == pytest.approx(100 * math.hypot(0.01, 0.002), rel=0.1)
    assert spreads.since_half(rows, spreads.last_fifth) == pytest.approx(0.2, rel=0.1)
    over_time = spreads.spread_over_time(rows)
    assert over_time[0] == pytest.approx(1.0, rel=0.1) and over_time[-1] > over_time[0]
    assert spreads.seconds_per_block(rows) == 7.0


# --- pictures --------------------------------------------------------------------------------------------------------


def test_the_ladder_is_drawn_by_active_parameters(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = []
    for name, loss in (("10m", 1.03), ("moe-1m", 1.02), ("1m", 1.01)):
        own = ladder.SIZES[name]
        [model] = [model for model, size in ladder.sizes_by_model().items() if size is own]
        for row in block(100, bf16=1.0, control=1.0, folded=loss, block=9.0):
            rows.append(row | {"model": model, "tokens": own.tokens})
    results.write(
        results.made_today(ladder.NAME, [*rows, *block(100, bf16=1.0, control=1.0)], "octavo bench parity"), tmp_path
    )
    [panel] = ladder_plots.ladder_data(tmp_path)
    labels = [size["label"] for size in panel["sizes"]]
    assert panel["title"] == "half" and labels == ["llama-923k\n20", "moe-1m\n20", "llama-11m\n20"]
    means = [{bar["arm"]: bar["mean"] for bar in size["gaps"]} for size in panel["sizes"]]
    assert means == [{"folded": pytest.approx(gap), CONTROL: 0.0} for gap in (1.0, 2.0, 3.0)]
    ladder_plots.draw("parity-ladder", [panel], tmp_path)
    assert (tmp_path / "parity-ladder.svg").is_file()


def test_the_ladder_has_shorter_runs_of_larger_sizes_beside_the_others(tmp_path: Path) -> None:
    rows = []
    for name, condition in (("1m", "half+short"), ("3m", "half+short"), ("10m", "half+short+short")):
        own = ladder.under(condition, ladder.SIZES[name])
        [model] = [model for model, size in ladder.sizes_by_model().items() if size is ladder.SIZES[name]]
        for row in block(100, bf16=1.0, control=1.0, folded=1.01):
            rows.append(row | {"model": model, "tokens": own.tokens, "condition": condition})
    results.write(results.made_today(ladder.NAME, rows, "octavo bench parity"), tmp_path)
    [panel] = ladder_plots.ladder_data(tmp_path)
    labels = [size["label"] for size in panel["sizes"]]
    assert panel["title"] == "half+short" and labels == ["llama-923k\n5", "llama-4m\n5", "llama-11m\n1.3"]


def test_pictures_are_drawn_of_any_number_of_blocks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, (data, _) in ladder_plots.PLOTS.items():
        ladder_plots.draw(name, data(tmp_path), tmp_path)
    assert not [*tmp_path.iterdir()]
    one = block(100, bf16=1.0, control=1.001, folded=1.01)
    lost = [run(BF16, 101, 1.0), run(CONTROL, 101, 1.0) | {"error": "the loss was not finite at step 0"}]
    results.write(results.made_today(ladder.NAME, [*one, *lost], "octavo bench parity"), tmp_path)
    [panel] = ladder_plots.time_data(tmp_path)
    assert panel["null"] == [[0.0, 0.0]] and panel["recipes"] == [[0.0, None], [0.0, None]]
    drawn = []
    for _ in range(2):
        ladder_plots.draw("parity-over-time", [panel], tmp_path)
        drawn.append((tmp_path / "parity-over-time.svg").read_bytes())
    assert drawn[0] == drawn[1]


def test_costs_follow_from_the_spread_of_gaps(tmp_path: Path) -> None:
    draw = np.random.default_rng(2)
    rows = [
        row for s in range(40) for row in block(100 + s, bf16=1.0, control=1.0, folded=1.01 + draw.normal(0, 0.002))
    ]
    results.write(results.made_today(ladder.NAME, rows, "octavo bench parity"), tmp_path)
    line = spreads.cost_table(tmp_path).splitlines()[3]
    _, study, loss, seconds, pair, pairs, hours, *_ = (cell.strip() for cell in line.split("|"))
    assert (study, loss, seconds) == ("llama-1m, half", ladder.LOSSES["fresh_loss"], "3.0")
    assert float(pair.removesuffix(" %")) == pytest.approx(0.2, rel=0.3)  # the gap of 1 % is no spread
    assert int(pairs) == ladder.pairs_for(ladder.MARGIN / float(pair.removesuffix(" %")))
    assert float(hours) == round(int(pairs) * 3 / 3600, 1)


def test_the_summary_has_a_line_per_study_with_all_recipes(tmp_path: Path) -> None:
    remedy = {"folded+run.last_share=0.3": 1.0}
    rows = [row for seed in range(5) for row in block(seed, bf16=1.0, control=1.0, folded=1.01, **remedy)]
    rows += [row | {"condition": "quarter"} for row in block(0, bf16=1.0, control=1.0, block=1.01)]
    assert ladder.summary_table(tmp_path) == ""
    results.write(results.made_today("ladder", rows, "x", device="cpu"), tmp_path)
    _, _, line = ladder.summary_table(tmp_path).splitlines()
    assert line == "| half | llama-1m |  |  |  | 5 | +1.000 % ± 0.000 % | fails | 5 | +0.000 % ± 0.000 % | passes |"


def test_a_gap_is_worth_the_compute_that_would_lower_bf16s_loss_as_much(tmp_path: Path) -> None:
    rows: list[Row] = []
    for name, loss in (("1m", 1.0), ("3m", 0.8)):
        own = ladder.SIZES[name]
        size = {"model": ladder.model_name("llama", own.parameters), "tokens": own.tokens, "condition": "half"}
        rows += [row | size for row in block(0, bf16=loss, control=loss, folded=1.002 * loss)]
        rows += [row | size | {"condition": "quarter"} for row in block(0, bf16=9.0, control=9.0, folded=9.9)]
    assert ladder.worth_table(tmp_path) == ""
    results.write(results.made_today("ladder", rows, "x", device="cpu"), tmp_path)
    compute = [6 * ladder.SIZES[name].parameters * ladder.SIZES[name].tokens for name in ("1m", "3m")]
    slope = math.log(1 / 0.8) / math.log(compute[1] / compute[0])
    worth = 100 * (1.002 ** (1 / slope) - 1)
    _, _, *lines = ladder.worth_table(tmp_path).splitlines()
    assert [line.split(" | ")[-2] for line in lines] == [f"{worth:.1f} %"] * 2
    assert [line.split(" | ")[-1] for line in lines] == ["4.1 % |"] * 2  # by the slope of large models: exp(0.04) - 1


def test_gaps_of_four_sizes_are_extrapolated_by_a_line_through_their_means(tmp_path: Path) -> None:
    rows: list[Row] = []
    gaps = {"1m": 0.1, "3m": 0.2, "10m": 0.15, "30m": 0.3}
    for name, gap in gaps.items():
        own = ladder.SIZES[name]
        size = {"model": ladder.model_name("llama", own.parameters), "tokens": own.tokens, "condition": "half"}
        for seed, off in ((0, -0.01), (1, 0.01), (2, 0.0)):
            losses = {"bf16": 1.0, "control": 1.0, "folded": 1 + (gap + off) / 100}
            losses |= {"block": 1.1} if name != "30m" else {}  # three sizes make no line
            losses |= {"rowwise": 1.1} if name != "30m" or seed else {}  # nor does a size of two pairs
            rows += [row | size for row in block(seed, **losses, tensorwise=1.1)]
    del rows[-1]["fresh_loss"], rows[-1]["heldout_loss"]
    rows[-1]["error"] = "tensorwise diverged"  # nor does a recipe that diverged in one of its blocks
    results.write(results.made_today("ladder", rows, "x", device="cpu"), tmp_path)
    (line,) = ladder.trend_table(tmp_path).splitlines()[2:]
    x = [math.log10(ladder.SIZES[name].parameters) for name in gaps]
    assert line.split(" | ")[:4] == ["| half", "folded", "llama-923k to llama-29m", "3, 3, 3, 3"]
    assert line.split(" | ")[6] == line_by_matrices(x, [*gaps.values()], 9.0)


def test_two_points_make_no_line() -> None:
    with pytest.raises(ConfigError, match="three or more"):
        fit([1.0, 2.0], [0.0, 1.0])


def line_by_matrices(x: list[float], y: list[float], at: float) -> str:
    """By matrices: the mean of y at a point, and its 95 % interval with two degrees of freedom."""
    design = np.stack([np.ones(4), x], 1)
    inverse = np.linalg.inv(design.T @ design)
    weights = inverse @ design.T @ np.array(y)
    variance = np.square(np.array(y) - design @ weights).sum() / 2
    point = np.array([1.0, at])
    return f"{point @ weights:+.2f} % ± {4.303 * math.sqrt(variance * (point @ inverse @ point)):.2f} %"


def test_a_compact_picture_has_the_same_lines_and_text() -> None:
    path = '<path d="M 0.12345 1.987 \nL 2 3.14159 \nL 4 5 \nz\n" style="opacity: 0.25"/>'
    curve = '<path d="M 0 1 \nC 0.265 1 2 3 4 5 \nL 6 7 \n"/>'
    assert ladder_plots.compact(f"<g>\n  {path}\n  <text>0.125</text>\n</g>") == (
        '<g>\n<path d="M 0.1 2 2 3.1 4 5 z" style="opacity: 0.25"/>\n<text>0.125</text>\n</g>'
    )
    assert ladder_plots.compact(curve) == '<path d="M 0 1 C 0.3 1 2 3 4 5 L 6 7"/>'
