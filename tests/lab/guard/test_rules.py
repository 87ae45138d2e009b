"""Rules, each against measurements that break it by a little, and by a little not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loops import ROWS, telemetry

from octavo.kernels.sample import STATS
from octavo.lab.guard.alarms import Alarm, Observation
from octavo.lab.guard.config import GuardConfig
from octavo.lab.guard.history import LEAST
from octavo.lab.guard.parameters import ParameterStats
from octavo.lab.guard.rules import RULES, AlarmRules

QUIET = [2.0, 2.1, 2.0, 1.9, 2.0, 2.1, 2.0, 1.9, 2.0, 2.1, 2.0, 1.9]


def watch(steps: int = len(QUIET), **config: object) -> AlarmRules:
    """Return rules with a quiet past."""
    made = AlarmRules(GuardConfig(**config))  # type: ignore[arg-type]
    for step in range(1, steps + 1):
        assert made.check(seen(step, QUIET[(step - 1) % len(QUIET)])) is None
    return made


def seen(step: int, loss: float = 2.0, norm: float = 1.0, table: np.ndarray | None = None) -> Observation:
    return Observation(step, loss, norm, 1e-3, telemetry() if table is None else table, ROWS)


def test_a_quiet_run_raises_nothing() -> None:
    assert watch().check(seen(13, 2.2)) is None


@pytest.mark.parametrize(
    ("observation", "rule", "layer", "role"),
    [
        (seen(13, 5.0), "loss spike", "", ""),
        (seen(13, norm=31.0), "gradient spike", "", ""),
        (seen(13, math.nan), "nonfinite", "", ""),
        (seen(13, norm=math.inf), "nonfinite", "", ""),
        (seen(13, table=telemetry(b_weight_amax=4.2)), "weight jump", "b", "weight"),
        (seen(13, math.nan, table=telemetry(b_input_nonfinite=0.01)), "nonfinite", "b", "input"),
        (seen(13, table=telemetry(a_grad_output_nonfinite=0.01, b_input_nonfinite=0.5)), "nonfinite", "b", "input"),
        (
            seen(13, table=telemetry(a_grad_output_nonfinite=1, b_grad_output_nonfinite=1)),
            "nonfinite",
            "b",
            "grad_output",
        ),
    ],
)
def test_each_sudden_fault(observation: Observation, rule: str, layer: str, role: str) -> None:
    alarm = watch().check(observation)
    assert alarm is not None
    assert (alarm.rule, alarm.layer, alarm.role, alarm.step) == (rule, layer, role, 13)


@pytest.mark.parametrize(
    "observation",
    [
        seen(13, 2.2),
        seen(13, norm=29.0),
        seen(13, table=telemetry(b_weight_amax=3.9)),
        seen(13, table=telemetry(b_input_amax=1000.0)),
        seen(13, table=telemetry(a_input_flushed=1.0)),
    ],
)
def test_what_is_below_a_limit_is_none(observation: Observation) -> None:
    assert watch().check(observation) is None


def test_a_weight_may_grow_as_far_as_its_learning_rate_carries_it() -> None:
    fresh = AlarmRules(GuardConfig())
    assert fresh.check(seen(1, table=telemetry(a_weight_amax=1e-4))) is None
    assert fresh.check(seen(2, table=telemetry(a_weight_amax=1e-4 + 0.09))) is None
    assert fresh.check(seen(3, table=telemetry(a_weight_amax=0.5))) is not None


def test_a_beginning_has_no_spikes() -> None:
    fresh = AlarmRules(GuardConfig())
    assert all(fresh.check(seen(step, 2.0 * step, 10.0**step)) is None for step in range(1, LEAST + 1))


def test_a_loss_that_falls_fast_hides_no_spike() -> None:
    falling = AlarmRules(GuardConfig())
    losses = [5.5 * 0.97**step for step in range(24)]
    for step, loss in enumerate(losses, 1):
        assert falling.check(Observation(step, loss, 1.0, 1e-3)) is None
    assert falling.check(Observation(25, 5.5, 1.0, 1e-3)) is not None


def test_what_raised_an_alarm_is_not_the_past_of_others() -> None:
    made = watch()
    limit = made.loss_limit
    made.check(seen(13, 50.0))
    assert made.loss_limit == limit


def test_a_budget_wants_steps_on_end() -> None:
    made = watch(patience=3, flushed=0.05)
    over, under = telemetry(a_input_flushed=0.06, a_weight_saturated=0.01), telemetry(a_input_flushed=0.049)
    assert [len(made.over_budget(seen(13 + i, table=over))) for i in range(2)] == [0, 0]
    assert made.over_budget(seen(15, table=under)) == []
    found = [made.over_budget(seen(16 + i, table=over)) for i in range(3)]
    assert found[:2] == [[], []]
    assert [(alarm.rule, alarm.role) for alarm in found[2]] == [("saturated", "weight")]  # ten limits, not 1.2
    made.forgive("a")
    assert made.over_budget(seen(19, table=over)) == []


def test_gradients_have_a_budget_of_their_own() -> None:
    made = watch(patience=1, flushed=0.05, flushed_gradient=0.25)
    assert made.over_budget(seen(13, table=telemetry(b_grad_output_flushed=0.2))) == []
    assert [a.role for a in made.over_budget(seen(14, table=telemetry(b_grad_output_flushed=0.3)))] == ["grad_output"]


def test_the_past_goes_into_a_checkpoint() -> None:
    import json

    made = watch(patience=2)
    over = telemetry(a_input_flushed=0.06)
    made.over_budget(seen(13, table=over))
    again = AlarmRules(GuardConfig(patience=2))
    again.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert again.loss_limit == made.loss_limit and again.gradient_limit == made.gradient_limit
    assert again.over_budget(seen(14, table=over)) == made.over_budget(seen(14, table=over)) != []
    assert again.check(seen(14, table=telemetry(a_weight_amax=5.0))) is not None


def noise(steps: int, level: float = 2.0, spread: float = 0.05, seed: int = 0) -> np.ndarray:
    return level + spread * np.random.default_rng(seed).standard_normal(steps)


def alarms(rules: AlarmRules, losses: np.ndarray, first: int = 1, **fields: Any) -> list[Alarm]:
    found = (
        rules.check(Observation(step, float(loss), 1.0, 1e-3, **fields)) for step, loss in enumerate(losses, first)
    )
    return [alarm for alarm in found if alarm is not None]


def test_a_slow_rise_of_the_loss_is_seen_before_it_is_a_spike() -> None:
    rules = AlarmRules(GuardConfig())
    assert alarms(rules, noise(200)) == []
    found = alarms(rules, noise(40, 2.12, seed=1), 201)
    assert [alarm.rule for alarm in found] == ["loss drift"]  # once: the level is adopted
    assert found[0].step <= 220


def test_a_gap_to_the_baseline_is_seen_that_the_loss_hides() -> None:
    rules, losses = AlarmRules(GuardConfig()), noise(120, spread=0.2)
    gaps = 1 + noise(120, 0.0, 0.0005, seed=2)
    gaps[80:] += 0.01
    found = []
    for step, (loss, gap) in enumerate(zip(losses, gaps, strict=True), 1):
        found.append(rules.check(Observation(step, float(loss * gap), 1.0, 1e-3, baseline_loss=float(loss))))
    told = [alarm for alarm in found if alarm is not None]
    assert [alarm.rule for alarm in told] == ["gap"] and 81 <= told[0].step <= 86


def test_a_baseline_that_is_not_finite_is_no_fault_of_the_run() -> None:
    assert alarms(AlarmRules(GuardConfig()), noise(80), baseline_loss=math.nan) == []
    assert alarms(AlarmRules(GuardConfig()), noise(80), baseline_loss=0.0) == []


@pytest.mark.parametrize(("layer", "role"), [("b", "input"), ("a", "grad_output")])
def test_a_layer_whose_variance_shifts_is_named(layer: str, role: str) -> None:
    rules, draw = AlarmRules(GuardConfig()), np.random.default_rng(0)
    told = []
    for step in range(1, 121):
        table = telemetry()
        table[:, STATS.index("variance")] = np.exp(0.05 * draw.standard_normal(len(ROWS)))
        if step > 80:
            table[ROWS.index((layer, role)), STATS.index("variance")] *= 1.5
        told.append(rules.check(Observation(step, 2.0, 1.0, 1e-3, table, ROWS)))
    found = [alarm for alarm in told if alarm is not None]
    assert [(alarm.rule, alarm.layer, alarm.role) for alarm in found] == [("layer shift", layer, role)]
    assert found[0].step <= 85


@pytest.mark.parametrize(("factors", "layer"), [((1, 9, 1, 1), "b"), ((9, 9, 9, 9), ""), ((1, 1, 1, 1), None)])
def test_clipping_hides_no_gradient(factors: tuple[int, ...], layer: str | None) -> None:
    rows, draw = [(name, "grad_weight") for name in "abcd"], np.random.default_rng(0)
    rules, told = AlarmRules(GuardConfig()), []
    for step in range(1, 121):
        table, clipped = np.zeros((4, len(STATS)), dtype=np.float32), np.exp(draw.standard_normal())
        own = np.exp(0.05 * draw.standard_normal(4)) * (factors if step > 80 else 1)
        table[:, STATS.index("variance")] = own * (clipped if layer != "" else 1)
        told.append(rules.check(Observation(step, 2.0, 1.0, 1e-3, table, rows)))
    found = [(alarm.layer, alarm.role) for alarm in told if alarm is not None]
    assert found == ([] if layer is None else [(layer, "grad_weight")])


@pytest.mark.parametrize("outliers", [1, 2])
def test_one_batch_is_no_shift_however_far_out(outliers: int) -> None:
    rules, draw, told = AlarmRules(GuardConfig()), np.random.default_rng(0), []
    for step in range(1, 121):
        table = telemetry()
        table[:, STATS.index("variance")] = np.exp(0.05 * draw.standard_normal(len(ROWS)))
        table[2, STATS.index("variance")] *= 50.0 if 80 < step <= 80 + outliers else 1.0
        told.append(rules.check(Observation(step, 2.0, 1.0, 1e-3, table, ROWS)))
    assert [alarm.step for alarm in told if alarm is not None] == [82][: outliers - 1]


def test_variances_that_overflow_shift_and_warn_of_nothing() -> None:
    rows = [("a", "input"), ("a", "grad_weight"), ("b", "grad_weight")]
    rules, told = AlarmRules(GuardConfig()), []
    with np.errstate(all="raise"):
        for step in range(1, 91):
            table = np.zeros((3, len(STATS)), dtype=np.float32)
            table[:, STATS.index("variance")] = np.inf if step == 60 or step > 80 else 1.0
            told.append(rules.check(Observation(step, 2.0, 1.0, 1e-3, table, rows)))
    assert [alarm.step for alarm in told if alarm is not None] == [84]


def test_layers_that_leave_fp8_start_a_new_history() -> None:
    rules = AlarmRules(GuardConfig())
    for step in range(1, 121):
        table = telemetry() if step <= 60 else telemetry()[:-1]
        table[:, STATS.index("variance")] = 1.0 if step <= 60 else 5.0
        assert rules.check(Observation(step, 2.0, 1.0, 1e-3, table, ROWS[: len(table)])) is None


def parameters(**changed: Any) -> ParameterStats:
    """Return a check of four parameters where nothing is wrong but for the fields given."""
    names = ("a.weight", "b.weight", "c.weight", "d.weight")
    plain = {"norm": 8.0, "change": 5e-4, "first": 1.0, "second": 1.0, "disagreement": 0.0}
    columns = {key: np.full(4, value) for key, value in plain.items()}
    for key, value in changed.items():
        columns[key] = np.where(np.arange(4) == 1, value, columns[key]) if np.ndim(value) == 0 else np.array(value)
    return ParameterStats(names, 5, *columns.values())


@pytest.mark.parametrize(
    ("changed", "rule", "layer"),
    [
        ({"change": 0.01}, "update", "b"),
        ({"change": [0.01] * 4}, "update", ""),
        ({"change": [0.0] * 4}, "no update", ""),
        ({"second": 0.1}, "moments", "b"),
        ({"second": 200.0}, "moments", "b"),
        ({"norm": math.nan}, "nonfinite", "b"),
        ({"second": math.inf}, "nonfinite", "b"),
        ({"disagreement": 0.1}, "ranks differ", "b"),
    ],
)
def test_what_no_update_explains(changed: dict[str, Any], rule: str, layer: str) -> None:
    rules = AlarmRules(GuardConfig())
    for step in range(5, 30, 5):
        assert rules.check(Observation(step, 2.0, 1.0, 1e-3, parameters=parameters())) is None
    alarm = rules.check(Observation(30, 2.0, 1.0, 1e-3, parameters=parameters(**changed)))
    assert alarm is not None and (alarm.rule, alarm.layer) == (rule, layer)


@pytest.mark.parametrize(("norm", "layer"), [([8.0, math.nan, 8.0, 8.0], "b"), ([math.nan] * 4, None)])
def test_a_nan_in_one_parameter_is_suspect(norm: list[float], layer: str | None) -> None:
    suspect = AlarmRules(GuardConfig()).suspect(Observation(5, 2.0, math.nan, 1e-3, parameters=parameters(norm=norm)))
    assert (suspect and suspect.layer) == layer


@pytest.mark.parametrize(("steps", "is_fault"), [(5, True), (20, False)])
def test_moments_decay_with_each_step_between_checks(steps: int, is_fault: bool) -> None:
    rules, check = AlarmRules(GuardConfig()), parameters(change=5e-4)._replace(steps=steps)
    assert rules.check(Observation(20, 2.0, 1.0, 1e-3, parameters=check)) is None
    decayed = check._replace(second=check.second * 0.9**20)
    alarm = rules.check(Observation(40, 2.0, 1.0, 1e-3, parameters=decayed))
    assert (alarm is not None and alarm.rule == "moments") == is_fault


def test_a_rollback_in_a_warm_up_is_not_its_end() -> None:
    rules = AlarmRules(GuardConfig())
    start = rules.state_dict()
    for _ in range(2):
        assert all(rules.check(Observation(step, 2.0, 1.0, 1e-4 * step)) is None for step in range(1, 13))
        rules.load_state_dict(start)


def test_moments_may_grow_in_a_warm_up() -> None:
    rules = AlarmRules(GuardConfig())
    for step in range(5, 30, 5):
        grown = parameters(second=[200.0 ** (step // 5)] * 4)
        assert rules.check(Observation(step, 2.0, 1.0, 1e-4 * step, parameters=grown)) is None


def test_a_parameter_that_rounds_its_updates_away_is_no_fault() -> None:
    rules = AlarmRules(GuardConfig())
    for step in range(5, 60, 5):
        check = parameters(change=0.0 if step > 30 else 5e-4)
        assert rules.check(Observation(step, 2.0, 1.0, 1e-3, parameters=check)) is None


def test_an_update_grows_with_a_learning_rate_that_was_used_before_only() -> None:
    rules = AlarmRules(GuardConfig())
    for step, lr in ((5, 1e-3), (10, 1e-3), (15, 1e-3), (20, 1e-4), (25, 1e-3)):
        check = parameters(change=[0.5 * lr] * 4)
        alarm = rules.check(Observation(step, 2.0, 1.0, lr, parameters=check))
        assert alarm is None or alarm.rule == "learning rate"
    alarm = rules.check(Observation(30, 2.0, 1.0, 2e-2, parameters=parameters(change=[1e-2] * 4)))
    assert alarm is not None and alarm.rule == "update"


@pytest.mark.parametrize("kind", ["normal", "lognormal", "student"])
def test_noisy_losses_are_no_fault(kind: str) -> None:
    draw = np.random.default_rng(3)
    losses = {
        "normal": 2 + 0.2 * draw.standard_normal(3000),
        "lognormal": 2 * np.exp(0.5 * draw.standard_normal(3000)),
        "student": 2 + 0.1 * draw.standard_t(2.5, 3000),
    }[kind]
    assert alarms(AlarmRules(GuardConfig()), losses) == []


def test_a_lasting_level_is_adopted_and_told_once() -> None:
    rules = AlarmRules(GuardConfig())
    alarms(rules, noise(100))
    told = [alarm for alarm in alarms(rules, noise(300, 6.0, seed=1), 101) if rules.is_news(alarm)]
    assert [(alarm.rule, alarm.step) for alarm in told] == [("loss spike", 101)]


def test_a_level_is_adopted_after_four_alarms_in_a_row() -> None:
    rules = watch()
    found = [rules.check(seen(step, 6.0)) for step in range(13, 25)]
    assert [alarm and alarm.rule for alarm in found] == ["loss spike"] * 4 + [None] * 8


def test_a_reported_alarm_ends_a_row_as_a_quiet_step_does() -> None:
    differ = Observation(16, 2.0, 1.0, 1e-3, telemetry(), ROWS, parameters=parameters(disagreement=0.1))
    for between, rule in ((seen(16), None), (differ, "ranks differ")):
        rules = watch()
        spikes = [rules.check(seen(step, 6.0)) for step in (13, 14, 15)]
        alarm = rules.check(between)
        spikes += [rules.check(seen(step, 6.0)) for step in range(17, 23)]
        assert (alarm and alarm.rule) == rule
        assert [alarm and alarm.rule for alarm in spikes] == ["loss spike"] * 7 + [None] * 2


def test_a_rise_of_the_loss_for_eight_steps_is_a_drift() -> None:
    """Over 16 steps, half of which are as before, it is below the limit."""
    for height, count in ((0.045, 1), (0.02, 0)):
        rules, steps = AlarmRules(GuardConfig()), np.arange(108)
        losses = 2 + np.where(steps % 2, 0.02, -0.02) + np.where(steps >= 100, height, 0.0)
        found = alarms(rules, losses)
        assert [alarm.rule for alarm in found] == ["loss drift"] * count


def test_a_gap_of_less_than_a_fifth_of_a_percent_is_none_however_quiet_the_run() -> None:
    for height, rule in ((0.0015, []), (0.0025, ["gap"])):
        rules, steps = AlarmRules(GuardConfig()), np.arange(80)
        losses, gaps = 2 + np.where(steps % 2, 0.02, -0.02), 1 + np.where(steps >= 70, height, 0.0)
        found = [
            rules.check(Observation(step, float(loss * gap), 1.0, 1e-3, baseline_loss=float(loss)))
            for step, (loss, gap) in enumerate(zip(losses, gaps, strict=True), 1)
        ]
        assert [alarm.rule for alarm in found if alarm is not None] == rule


def test_a_loss_that_stands_still_is_no_repeated_batch() -> None:
    rules = AlarmRules(GuardConfig())
    assert alarms(rules, np.append(noise(100, spread=0.2), np.full(20, 2.0))) == []


def test_a_batch_that_is_repeated_is_seen() -> None:
    rules = AlarmRules(GuardConfig())
    alarms(rules, noise(100, spread=0.2))
    found = alarms(rules, 2 - 0.02 * np.arange(10), 101)
    assert found[0].rule == "repeat" and found[0].step <= 108


@pytest.mark.parametrize(
    ("rates", "noted"),
    [
        ([1e-3] * 20 + [4e-3] * 4, [20]),
        ([1e-3] * 20 + [1e-3 * 1.08**n for n in range(1, 25)], [34]),
        ([1e-4 * n for n in range(1, 60)], []),
        ([1e-4 * 2**n for n in range(12)], []),
        ([1e-4 * n for n in range(1, 11)] + [1e-3] * 20, []),
        ([1e-4 * n for n in range(1, 11)] + [1e-3] * 20 + [4e-3], [30]),
        ([1e-3] * 20 + [2e-3] * 20, []),
        ([1e-3 * (1 + 0.5 * math.cos(n / 9)) for n in range(120)], []),
        ([1e-3] * 20 + [0.0] * 3 + [1e-3] * 20, []),
    ],
    ids=[
        "a jump",
        "a growth",
        "a warm-up",
        "a steep warm-up",
        "a short warm-up",
        "a jump after it",
        "a limit lifted",
        "a cosine",
        "a pause",
    ],
)
def test_a_learning_rate_that_rises_after_its_warm_up_is_noted_once(rates: list[float], noted: list[int]) -> None:
    rules = AlarmRules(GuardConfig())
    found = [(step, rules.check(Observation(step, 2.0, 1.0, lr))) for step, lr in enumerate(rates)]
    alarms = [(step, alarm) for step, alarm in found if alarm is not None]
    assert [step for step, alarm in alarms if rules.is_news(alarm)] == noted
    assert {alarm.rule for _, alarm in alarms} <= {"learning rate"}


def test_every_rule_is_documented() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "how-to" / "guard-a-run.md").read_text("utf-8")
    assert [rule for rule in RULES if f"`{rule}`" not in guide] == ["refused"]  # an event of the other rules
