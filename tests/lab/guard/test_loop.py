"""Faults that strike a loop: found, attributed, and what they did undone."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loops import MLP, TOKENS, WIDTH, batches, loss_of, make_loop
from torch import Tensor, nn

import octavo
from octavo import convert, recipes
from octavo.errors import ConfigError, RunError, UnsupportedError
from octavo.lab.guard import Alarm, GuardConfig, GuardEvent, Loop, Update
from octavo.lab.guard.diagnosis import Probe
from octavo.lab.guard.incident import Incident
from octavo.lab.guard.locate import NonFinite
from octavo.lab.guard.rules import LASTING
from octavo.lab.monitor.monitor import Monitor
from octavo.lab.monitor.store import RunReader
from octavo.nn.scaling_state import stored_scales
from octavo.optim import AdamW

STEPS, AT = 40, 25


def losses(loop: Loop, steps: int = STEPS, strike: Any = None) -> list[float]:
    """Return the loss of each step that counts; `strike(loop)` is called once, before step `AT`."""
    found: dict[int, float] = {}
    for step, loss in loop.steps(steps):
        found[step] = float(loss)
        if step == AT - 1 and strike is not None:
            strike, now = None, strike
            now(loop)
    return [found[step] for step in range(1, steps + 1)]


@cache
def undisturbed(recipe: str = "folded") -> tuple[float, ...]:
    """Return the losses of a loop that nothing happens to."""
    return tuple(losses(make_loop(recipe)[0]))


def poisoned(change: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches, that of step `AT` changed."""
    for number, batch in enumerate(batches(), 1):
        yield change(*batch) if number == AT else batch


def of_cause(events: list[GuardEvent], cause: str) -> GuardEvent:
    """Return the only event that names a cause, which must be this one."""
    (found,) = [event for event in events if event.cause]
    assert found.cause == cause
    return found


def test_without_a_fault_guardrails_change_nothing() -> None:
    guarded, events = make_loop()
    plain, _ = make_loop(mode="off")
    assert losses(guarded) == losses(plain)
    assert events == []


@pytest.mark.parametrize("mode", ["off", "act"])
def test_it_is_not_copied(mode: str) -> None:
    with pytest.raises(UnsupportedError, match=r"guard\.Loop: cannot be copied"):
        copy.deepcopy(make_loop(mode=mode)[0])


@pytest.mark.parametrize("recipe", ["folded", "delayed"])
def test_a_weight_row_that_is_struck_once_is_as_if_it_had_not_been(recipe: str) -> None:
    loop, events = make_loop(recipe)

    def strike(loop: Loop) -> None:
        loop.state.model.first.weight.data[3] *= 1000  # type: ignore[union-attr,operator]

    assert losses(loop, strike=strike) == [*undisturbed(recipe)]
    event = of_cause(events, "transient")
    assert (event.step, event.layer, event.role) == (AT, "first", "weight")
    assert "elements of row 3:" in event.text


@pytest.mark.parametrize(("every", "to"), [(10, 20), (12, 12), (40, 0)])
def test_a_snapshot_just_before_an_alarm_is_not_trusted(every: int, to: int) -> None:
    loop, events = make_loop(snapshot_every=every)

    def strike(loop: Loop) -> None:
        loop.state.model.first.weight.data[3] *= 1000  # type: ignore[union-attr,operator]

    losses(loop, strike=strike)
    assert events[0].action == f"back to step {to}"


@pytest.mark.parametrize(("value", "told"), [(40.0, "one element, row 7, column 9"), (2.0**126, "second weight")])
def test_an_element_that_is_struck_is_named(value: float, told: str) -> None:
    loop, events = make_loop()

    def strike(loop: Loop) -> None:
        loop.state.model.second.weight.data[7, 9] = value  # type: ignore[union-attr,operator]

    losses(loop, strike=strike)
    event = of_cause(events, "transient")
    assert (event.layer, event.role) == ("second", "weight")
    assert told in event.text


def test_a_batch_of_nonsense_is_passed_over() -> None:
    loop, events = make_loop(data=poisoned(lambda x, y: (x, 40 * torch.randn(TOKENS, WIDTH))))
    after = losses(loop)[-1]
    assert of_cause(events, "data").action == "batch skipped"
    assert after == pytest.approx(undisturbed()[-1], rel=0.05)


def test_an_infinity_in_a_batch_is_located() -> None:
    def strike(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone()
        x[11, 2] = torch.inf
        return x, y

    loop, events = make_loop(data=poisoned(strike))
    assert all(map(torch.isfinite, map(torch.tensor, losses(loop))))
    event = of_cause(events, "data")
    assert event.layer == "first"
    assert "first input, row 11" in event.text


def test_a_learning_rate_that_jumps_is_blamed_and_held() -> None:
    loop, events = make_loop()
    bump = torch.optim.lr_scheduler.LambdaLR(
        loop.state.update.optimizer, lambda made: 300.0 if AT <= made < AT + 4 else 1.0
    )
    loop.state.update = replace(loop.state.update, scheduler=bump)
    assert losses(loop)[-1] == pytest.approx(undisturbed()[-1], rel=0.05)
    event = of_cause([event for event in events if event.rule != "learning rate"], "optimizer")
    assert "300 times its limit now" in event.text
    assert loop.state.lr_limit == pytest.approx(3e-3)


def test_snapshots_of_steps_that_were_undone_are_forgotten() -> None:
    loop, events = make_loop()
    bump = torch.optim.lr_scheduler.LambdaLR(
        loop.state.update.optimizer, lambda made: 300.0 if 19 <= made < 23 else 1.0
    )
    loop.state.update = replace(loop.state.update, scheduler=bump)
    for step, _ in loop.steps(STEPS):
        assert all(saved.step < step for saved in loop.guard._snapshots)
    assert any(event.cause == "optimizer" for event in events)


def test_a_layer_that_cannot_change_stays_where_it_is() -> None:
    loop, events = make_loop()
    loop.state.cannot_refine = "its weights are elsewhere"
    before = loop.guard.state_dict()
    for step in (3, 6):  # the second is no news
        loop.guard._over_budget(Alarm(step, "flushed", "first", "input", 0.5, 0.1))
    assert loop.guard.state_dict()["ladder"] == before["ladder"]
    assert [(event.level, event.action) for event in events] == [("error", ""), ("warning", "")]
    assert "first cannot leave folded: its weights are elsewhere" in events[0].text


class Spiking(MLP):
    """From a step on, one token is so large that the others of its tensor vanish; its own output is as it was."""

    spikes = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.first(x))
        if not self.spikes:
            return self.second(hidden)
        large = torch.cat([torch.full_like(hidden[:1], 3e5), hidden[1:]])
        return torch.cat([self.second(hidden)[:1], self.second(large)[1:]])


def test_a_layer_that_fp8_harms_is_refined() -> None:
    loop, events = make_loop("tensorwise", patience=2, quiet=8)
    loop.state.model.__class__ = Spiking

    def strike(loop: Loop) -> None:
        loop.state.model.spikes = True  # type: ignore[assignment]

    losses(loop, 30, strike)
    event = of_cause(events, "precision")
    assert (event.layer, event.role, event.rule) == ("second", "input", "flushed")
    assert event.action == "second computes by folded"
    assert loop.state.model.second.recipe.name == "folded"  # type: ignore[union-attr]
    assert loop.state.model.first.recipe.name == "tensorwise"  # type: ignore[union-attr]
    loop.state.model.spikes = False  # type: ignore[assignment]
    for _ in loop.steps(STEPS):
        pass
    assert events[-1].action == "back to tensorwise"
    assert loop.state.model.second.recipe.name == "tensorwise"  # type: ignore[union-attr]


def test_a_run_goes_back_to_before_a_layer_was_refined() -> None:
    loop, events = make_loop("delayed", patience=1000, snapshot_every=20)

    def strike(loop: Loop) -> None:
        loop.guard._refinement.up("second", Alarm(AT, "saturated", "second", "input", 1.0, 0.5))
        loop.guard._refinement.up("second", Alarm(AT, "saturated", "second", "input", 1.0, 0.5))
        loop.state.model.first.weight.data[3] *= 1000  # type: ignore[union-attr,operator]

    losses(loop, strike=strike)
    assert [event.cause for event in events if event.cause] == ["precision", "precision", "transient"]
    assert loop.state.model.second.recipe.name == "folded"  # type: ignore[union-attr]


def test_watching_alone_changes_nothing() -> None:
    loop, events = make_loop(data=poisoned(lambda x, y: (x, 40 * torch.randn(TOKENS, WIDTH))), mode="watch")
    assert len(losses(loop)) == STEPS
    assert events[0].rule in ("loss spike", "gradient spike") and events[0].step == AT
    assert not any(event.action for event in events)


def test_the_shadow_says_how_far_fp8_is() -> None:
    loop, events = make_loop(shadow_every=10)
    losses(loop)
    gaps = [event.value for event in events if event.rule == "shadow"]
    assert len(gaps) == 3 and all(gap is not None and abs(gap) < 1 for gap in gaps)
    assert [*undisturbed()] == losses(make_loop(shadow_every=10)[0])


def test_trying_a_batch_leaves_no_trace() -> None:
    loop, _ = make_loop("delayed")
    large = loop.state.snapshot()
    losses(loop, 6)
    loop.state._buffer[large.position] = tuple(100 * part for part in loop.state._buffer[large.position])

    def noisy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(model, batch) * (1 + 0 * torch.rand(()))

    loop.state._loss_of = noisy
    kept, random, weights = stored_scales(loop.state.model), torch.get_rng_state(), loop.state._copy_state().model
    loop.state.probe(fp8=True, earlier=large)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(now, kept[name]) for name, now in stored_scales(loop.state.model).items())
    assert all(torch.equal(now, weights[name]) for name, now in loop.state.model.state_dict().items())
    assert all(parameter.grad is None for parameter in loop.state.model.parameters())


def test_a_level_that_lasts_is_adopted_and_passes_over_nothing() -> None:
    runs = {mode: make_loop(data=nonsense(set(range(AT, 100))), mode=mode) for mode in ("act", "watch")}
    assert losses(runs["act"][0]) == losses(runs["watch"][0])
    _, events = runs["act"]
    event = next(event for event in events if event.cause)
    assert (event.cause, event.action) == ("data", "the new level is adopted")
    assert event.text.endswith("4 of the next 4 batches are as bad")


def test_the_last_batch_may_be_bad() -> None:
    loop, events = make_loop(data=itertools.islice(nonsense({AT}), AT + 1))
    assert [step for step, _ in loop.steps(AT)][-1] == AT
    assert of_cause(events, "data").action == "batch skipped"


@pytest.mark.parametrize("lasts", [False, True])
def test_bad_batches_with_good_ones_between_are_passed_over_a_few_times(lasts: bool) -> None:
    bad = set(range(AT, 100 if lasts else AT + 5, 2))
    loop, events = make_loop(data=nonsense(bad))
    losses(loop)
    passed = sum(event.action == "batch skipped" for event in events)
    assert passed == (LASTING if lasts else 3)
    assert (events[-1].action == "the new level is adopted") == lasts


def test_a_nan_that_nothing_removes_ends_the_run_and_is_named() -> None:
    bad = ((x * torch.nan, y) if n >= AT else (x, y) for n, (x, y) in enumerate(batches(), 1))
    loop, _ = make_loop(data=bad, rollbacks=3)
    with pytest.raises(RunError, match=f"step {AT}: first input, row 0 .* is not finite, and nothing helps"):
        losses(loop)


def test_batches_that_end_are_an_error() -> None:
    loop, _ = make_loop(data=itertools.islice(batches(), 5))
    with pytest.raises(ConfigError, match="the batches end after 5, and step 6"):
        losses(loop)


@pytest.mark.parametrize(("mode", "most"), [("act", 30), ("watch", 1 + LASTING), ("off", 1)])
def test_old_batches_are_let_go(mode: str, most: int) -> None:
    loop, _ = make_loop(mode=mode, shadow_every=10)
    for _ in loop.steps(60):
        assert len(loop.state._buffer) <= most


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"flushed": 2.0}, "guard.flushed: 2.0"),
        ({"snapshot_every": 0}, "guard.snapshot_every: 0"),
        ({"quiet": -1}, "quiet"),
        ({"mode": "acts"}, "guard.mode: 'acts'"),
    ],
)
def test_impossible_limits_are_refused(setting: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        GuardConfig(**setting)


def test_its_own_state_goes_on() -> None:
    import json

    loop, _ = make_loop("tensorwise", patience=1)
    loop.state.model.__class__ = Spiking
    loop.state.model.spikes = True  # type: ignore[assignment]
    losses(loop, 12)
    state = json.loads(json.dumps(loop.guard.state_dict(), allow_nan=False))
    again, _ = make_loop("tensorwise", patience=1)
    again.guard.load_state_dict(state)
    assert again.state.model.second.recipe.name == "folded"  # type: ignore[union-attr]
    for part in again.guard.state_dict().keys() - {"fingerprints"}:  # of other weights
        assert json.dumps(again.guard.state_dict()[part]) == json.dumps(state[part])


def test_a_run_in_bf16_goes_on_from_the_state_of_one_with_refined_layers() -> None:
    loop, _ = make_loop()
    refined = {"first": {"rung": 2, "since": 3, "quiet": 500, "is_flushed": False}}
    state = {**loop.guard.state_dict(), "ladder": refined | {"second": {**refined["first"], "rung": 0}}}
    loop.close()
    model = MLP()
    with Loop(model, AdamW(model.parameters()), loss_of, batches()) as loop:
        loop.guard.load_state_dict(state)
        assert loop.guard.state_dict()["ladder"] == {} and loop.step() is not None


def test_weights_with_masters_go_back_to_before_the_first_step() -> None:
    model = MLP().half()
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def half(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0].half()).float().square().mean()

    with Loop(model, optimizer, half, batches(), config=GuardConfig(mode="act")) as loop:
        first = [parameter.detach().clone() for parameter in model.parameters()]
        loop.guard.before_step()
        snapshot = loop.state.snapshot()
        losses = [loop.step() for _ in range(2)]
        loop.state.restore(snapshot)
        assert all(map(torch.equal, model.parameters(), first))
        assert [loop.step() for _ in range(2)] == losses


def test_a_loop_without_a_plan_says_why_it_cannot_change_its_recipe() -> None:
    model = MLP()
    with Loop(model, AdamW(model.parameters()), loss_of, batches()) as loop:
        assert "no plan" in loop.guard.change_recipe(recipes.load("rowwise"))
        assert loop.guard._refinement.up("first", Alarm(1, "saturated", "first", "input", 1.0, 0.5)) is False
        assert loop.step() is not None


class WithExtraState(MLP):
    """Counts its calls in what a checkpoint has of it besides tensors."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_a_state_that_is_no_tensor_goes_back_too() -> None:
    model = WithExtraState()
    with Loop(model, AdamW(model.parameters()), loss_of, batches(), config=GuardConfig(mode="act")) as loop:
        loop.step()
        snapshot = loop.state.snapshot()
        loop.step()
        assert model.calls == 2
        loop.state.restore(snapshot)
        assert model.calls == 1


def test_a_scheduler_goes_back_too() -> None:
    torch.manual_seed(0)
    model = MLP()
    convert(model)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    events: list[GuardEvent] = []
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    loop = Loop(
        model,
        Update(optimizer, scheduler=scheduler),
        loss_of,
        batches(),
        config=GuardConfig(mode="act"),
        on_event=events.append,
    )
    for step, _ in loop.steps(STEPS):
        if step == AT and not events:
            model.first.weight.data[0] *= 1e4
    assert events[0].back_to == 0
    assert scheduler.last_epoch == STEPS


def nonsense(at: set[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches, those of some steps with targets that nothing can learn."""
    for number, (x, y) in enumerate(batches(), 1):
        draw = torch.Generator().manual_seed(number)
        yield (x, 40 * torch.randn(TOKENS, WIDTH, generator=draw)) if number in at else (x, y)


def test_batches_passed_over_stay_so_after_a_rollback() -> None:
    loop, events = make_loop(data=nonsense({AT, AT + 3}), snapshot_every=20)
    losses(loop)
    assert [event.action for event in events if event.cause == "data"] == ["batch skipped"] * 2
    assert loop.guard.state_dict()["skipped"] == [AT - 1, AT + 2]
    again, _ = make_loop()
    again.guard.load_state_dict(loop.guard.state_dict())
    again.state._seek(AT - 1)
    again.guard._pass_over()
    assert again.state.position == AT


def test_solved_incidents_do_not_count_toward_giving_up() -> None:
    bad = set(range(AT, AT + 30, 6))
    loop, events = make_loop(data=nonsense(bad), rollbacks=3)
    losses(loop, 60)
    assert sum(event.action == "batch skipped" for event in events) == len(bad)
    assert not any(event.action == "the new level is adopted" for event in events)


class Tokens(nn.Module):
    """An embedding before an MLP; token 9 is rare."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mlp = nn.Embedding(10, WIDTH), MLP()

    def forward(self, ids: Tensor) -> Tensor:
        return self.mlp(self.embedding(ids))


def test_a_nan_that_no_batch_touches_is_repaired_and_named() -> None:
    torch.manual_seed(0)
    model, draw, events = Tokens(), torch.Generator().manual_seed(0), []  # type: ignore[var-annotated]
    data = (torch.randint(9, (TOKENS,), generator=draw) for _ in range(200))
    loop = Loop(
        model,
        AdamW(model.parameters(), lr=1e-3, states="fp32"),
        lambda model, ids: (model(ids) - 1).square().mean(),
        data,
        config=GuardConfig(mode="act", snapshot_every=10),
        on_event=events.append,
    )
    losses(loop, STEPS, lambda loop: loop.state.model.embedding.weight.data[9].fill_(torch.nan))
    event = of_cause(events, "transient")
    assert event.layer == "embedding" and event.step <= AT + 5
    assert torch.isfinite(model.embedding.weight).all()


def test_a_nan_in_all_snapshots_is_never_saved_and_ends_the_run() -> None:
    loop, _ = make_loop(snapshot_every=10, rollbacks=2)

    def strike(_: Any) -> None:
        if loop.done >= AT:
            loop.state.model.first.weight.data[0, 0] = torch.nan  # type: ignore[union-attr,operator]

    bump = torch.optim.lr_scheduler.LambdaLR(loop.state.update.optimizer, lambda made: strike(made) or 1.0)
    loop.state.update = replace(loop.state.update, scheduler=bump)
    with pytest.raises(RunError, match=r"first\.weight is not finite"):
        for _ in loop.steps(80):
            for saved in loop.guard._snapshots:
                assert all(torch.isfinite(tensor).all() for tensor in saved.state.model.values())


def test_a_level_shift_is_noted_a_few_times() -> None:
    harder = ((x, y + 3 * torch.randn(TOKENS, WIDTH)) if n >= AT else (x, y) for n, (x, y) in enumerate(batches(), 1))
    loop, events = make_loop(data=harder, mode="watch")
    losses(loop, 150)
    assert 1 <= len(events) <= 12
    assert all(event.step < AT + 60 for event in events)


@pytest.mark.parametrize("mode", ["watch", "act"])
def test_an_optimizer_that_makes_no_steps_is_noted(mode: str) -> None:
    loop, events = make_loop(mode=mode)
    losses(loop, AT - 1)
    loop.state.update.optimizer.step = lambda: loop.state.telemetry.step()  # type: ignore[method-assign,union-attr]
    assert len([*loop.steps(60)]) >= 60 - AT
    (event,) = [event for event in events if event.rule == "no update" and not event.back_to]
    assert event.step <= AT + 10 and event.layer == ""
    assert event.cause == ("optimizer" if mode == "act" else "")


def test_gradients_that_are_wrong_for_good_are_not_blamed_on_data() -> None:
    loop, events = make_loop()
    compute, probing = loop.state._compute, [0]

    def probed(*args: Any, **options: Any) -> Probe:
        probing.append(1)
        try:
            return compute(*args, **options)
        finally:
            probing.pop()

    loop.state._compute = probed  # type: ignore[method-assign]
    for parameter in loop.state.model.parameters():
        parameter.register_hook(lambda gradient: gradient * (1000 if loop.done + probing[-1] >= AT else 1))
    losses(loop)
    event = next(event for event in events if event.cause)
    assert (event.rule, event.cause, event.action) == ("gradient spike", "optimizer", "the new level is adopted")


def test_a_nan_in_one_gradient_stays_there_and_is_named() -> None:
    loop, events = make_loop()

    def strike(loop: Loop) -> None:
        def once(gradient: Tensor) -> Tensor:
            handle.remove()
            return gradient.index_fill(0, torch.tensor(5), torch.nan)

        handle = loop.state.model.second.weight.register_hook(once)  # type: ignore[union-attr,operator]

    assert losses(loop, strike=strike) == [*undisturbed()]
    event = of_cause(events, "transient")
    assert (event.rule, event.layer) == ("nonfinite", "second")


def test_a_layer_whose_codes_saturate_is_blamed_for_its_shift() -> None:
    loop, events = make_loop("delayed", patience=1000)
    losses(loop, 12)
    guard, layer = loop.guard, "second"
    alarm = Alarm(13, "layer shift", layer, "grad_weight", 1.0, 0.5)
    share = Alarm(13, "saturated", layer, "input", 0.3, 1e-3)
    guard._rules.shares_over = lambda seen, _: [share] if seen.step == 13 else []  # type: ignore[method-assign]
    check, guard._rules.check = guard._rules.check, lambda seen: alarm if seen.step == 13 else check(seen)  # type: ignore[method-assign]
    losses_after = [loss for _, loss in loop.steps(20)]
    event = of_cause(events, "precision")
    assert losses_after and (event.layer, event.rule) == (layer, "saturated")
    assert event.action == "second computes by delayed+2bits"


def test_moments_that_are_lost_are_repaired() -> None:
    loop, events = make_loop()

    def strike(loop: Loop) -> None:
        loop.state.update.optimizer.state[loop.state.model.second.weight]["exp_avg_sq"].zero_()  # type: ignore[union-attr,index]

    assert losses(loop, strike=strike) == [*undisturbed()]
    assert of_cause(events, "transient").layer == "second"


def test_layers_swapped_at_resume_are_named() -> None:
    loop, events = make_loop()
    losses(loop, 12)
    state, first, second = loop.guard.state_dict(), loop.state.model.first.weight, loop.state.model.second.weight
    first.data, second.data = second.data.clone(), first.data.clone()  # type: ignore[union-attr]
    loop.guard.load_state_dict(state)
    loop.step()
    told = [(event.layer, event.cause) for event in events if event.rule == "fingerprint"]
    assert told == [("first", "model"), ("second", "model")]
    assert "first.weight is not what the checkpoint was written with: it is second.weight" in events[0].text


def test_a_step_whose_alarm_refines_a_layer_is_not_held_against_its_budgets() -> None:
    loop, events = make_loop()
    losses(loop, 12)
    guard, alarm = loop.guard, Alarm(13, "layer shift", "second", "input", 1.0, 0.5)
    check, guard._rules.check = guard._rules.check, lambda _: alarm  # type: ignore[method-assign]
    guard._raise = lambda alarm, _: (
        guard._refinement.up("second", alarm) and guard._refinement.up("second", alarm) and False
    )  # type: ignore[method-assign]
    loop.step()
    guard._rules.check = check  # type: ignore[method-assign]
    assert [event.action for event in events][-1] == "second computes by bf16"
    assert loop.step() is not None


def test_the_layer_that_fp8_harms_is_found_among_many() -> None:
    loop, _ = make_loop()
    probed: list[tuple[str, ...]] = []

    def probe(*, without: Any = (), **_: Any) -> Probe:
        probed.append(tuple(without))
        return Probe(1.0 if "l41" in without else 9.0, 1.0)

    loop.state.probe = probe  # type: ignore[method-assign]
    loop.state.telemetry = SimpleNamespace(rows=[(f"l{n}", "input") for n in range(64)])  # type: ignore[assignment]
    found = loop.guard._refinement._culprits(
        Alarm(AT, "loss spike", "", "", 9.0, 2.0), ["l7", "l8"], lambda probe: probe.loss < 2
    )
    assert found == ["l41"] and len(probed) < 20
    assert probed[:2] == [("l7",), ("l8",)]


@pytest.mark.parametrize("mode", ["watch", "act"])
def test_a_shadow_that_finds_harm_acts_or_says_that_it_does_not(mode: str) -> None:
    loop, events = make_loop(mode=mode, shadow_every=10)

    def probe(*, fp8: bool = True, without: Any = (), backward: bool = True) -> Probe:
        is_harmed = fp8 and "second" not in without and isinstance(loop.state.model.second, octavo.nn.Linear)
        return Probe(1.5 if is_harmed else 1.0, 0.0)

    loop.state.probe = probe  # type: ignore[method-assign]
    losses(loop)
    told = [event for event in events if event.rule == "shadow"]
    if mode == "watch":
        assert "only watch" in told[1].text and loop.state.model.second.recipe.name == "folded"  # type: ignore[union-attr]
    else:
        assert next(event.layer for event in told if event.cause == "precision") == "second"
        assert not isinstance(loop.state.model.second, octavo.nn.Linear)  # type: ignore[union-attr]


@pytest.mark.parametrize("harmed", [{20}, {20, 21, 22}, range(20, 40)])
def test_a_batch_that_fp8_harms_alone_is_noise(harmed: set[int]) -> None:
    loop, events = make_loop(mode="watch", shadow_every=10)

    def probe(*, fp8: bool = True, backward: bool = True) -> Probe:
        return Probe(1.015 if fp8 and loop.state.position in harmed else 1.0, 0.0)

    loop.state.probe = probe  # type: ignore[method-assign,assignment]
    losses(loop)
    noted = [event.step for event in events if event.rule == "shadow" and event.level != "info"]
    assert noted == ([20, 30] if len(harmed) > LASTING else [])


def test_the_last_batch_alone_decides_nothing() -> None:
    loop, events = make_loop(mode="watch", shadow_every=10, data=itertools.islice(batches(), 21))
    loop.state.probe = lambda *, fp8, backward: Probe(1.0 + fp8 * len(loop.state._peek(loop.state.position)), 0.0)  # type: ignore[method-assign]
    losses(loop, 21)
    first, last = (event for event in events if event.rule == "shadow")
    assert (first.step, first.level, last.step, last.level) == (10, "warning", 20, "info")
    assert "no batch follows" in last.text and "no batch follows" not in first.text


def test_only_the_end_of_the_batches_ends_the_probes_of_following_ones() -> None:
    loop, _ = make_loop(data=itertools.islice(batches(), 5))
    losses(loop, 2)
    assert len(loop.state.probe_following(LASTING, fp8=True)) == 2

    def wrong(*_: Any, **__: Any) -> Probe:
        raise ConfigError("a shape that no layer takes")

    loop.state._compute = wrong  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="a shape that no layer takes"):
        loop.state.probe_following(LASTING, fp8=True)


def test_a_second_loop_needs_the_first_closed() -> None:
    loop, _ = make_loop()
    with pytest.raises(ConfigError, match="close the `Loop` or `Monitor`"):
        Loop(loop.state.model, loop.state.update, loss_of, batches())
    loop.close()
    with Loop(loop.state.model, loop.state.update, loss_of, batches(), on_event=lambda _: None) as again:
        assert again.step() is not None
    assert again.state.telemetry is None


def test_blame_of_the_model_says_where_the_run_went_back_to() -> None:
    loop, events = make_loop()
    losses(loop)
    loop.guard._snapshots.append(replace(loop.state.snapshot(), rules=loop.guard._snapshots[-1].rules))
    alarm = Alarm(loop.done, "nonfinite", "first", "weight", math.nan, math.inf)
    loop.guard._blame_model(Incident(alarm, loop.done, {}), "first.weight is not finite", "first")
    assert events[-1].cause == "model" and events[-1].back_to == loop.done < STEPS


def test_a_weight_that_makes_a_batch_bad_is_found_whatever_its_layer_is_called() -> None:
    """`nn.ModuleDict` takes names with spaces and commas."""
    loop, events = make_loop()
    losses(loop, 12)
    loop.state.locate = lambda: NonFinite("heads.en, fr", "weight", (3,), 1)  # type: ignore[method-assign]
    loop.guard._blame_data(Incident(Alarm(12, "loss spike", "", "", 9.0, 2.0), loop.done, {}))
    assert (events[-1].cause, events[-1].layer) == ("model", "heads.en, fr")
    assert "heads.en, fr weight, row 3 (1 element) is not finite" in events[-1].text


def test_a_monitor_follows_a_loop_that_rolls_back(tmp_path: Path) -> None:
    loop, _ = make_loop()
    with Monitor(loop.state.model, tmp_path, telemetry=None) as monitor:
        loop.state.emit = monitor.guard_event
        for step, loss in loop.steps(STEPS):
            monitor.step(step, loss=loss)
            if step == AT - 1 and not loop.guard._unsolved:
                loop.state.model.first.weight.data[3] *= 1000  # type: ignore[union-attr,operator]
    run = RunReader(tmp_path)
    assert len(run.scalar("loss")) == STEPS
    assert any(event.text.startswith("transient: ") for event in run.events())


def norms_of(loop: Loop, steps: int) -> list[float]:
    """Return the gradient norms that the guardrails see in the next steps, and that of a probe after them."""
    seen: list[float] = []
    after = loop.guard.after_step
    loop.guard.after_step = lambda step: seen.append(float(step.gradient_norm)) or after(step)  # type: ignore[method-assign,func-returns-value]
    for _ in range(steps):
        loop.step()
    return [*seen, loop.state.probe().gradient_norm]


def loop_with(update: Any, model: nn.Module, **settings: Any) -> Loop:
    """Return a loop that reports nothing."""
    return Loop(model, update, loss_of, batches(), on_event=lambda _: None, config=GuardConfig(**settings))


def test_gradients_that_the_optimizer_stores_in_fp8_are_measured() -> None:
    found = []
    for gradients in ("wide", "fp8"):
        torch.manual_seed(0)
        model = MLP()
        optimizer = AdamW(model.named_parameters(), lr=1e-3, keep=lambda *_: None, gradients=gradients)
        found.append(norms_of(loop_with(optimizer, model), 3))
        assert not optimizer.stored_gradients
    assert found[1] == pytest.approx(found[0], rel=0.02)


def test_an_optimizer_that_leaves_no_gradients_to_a_loop_is_refused() -> None:
    model = MLP()
    with pytest.raises(ConfigError, match=r"release=True.*gradients='fp8'"):
        loop_with(AdamW(model.parameters(), release=True), model)
    optimizer = AdamW(model.named_parameters(), keep=lambda *_: None, gradients="fp8")
    with pytest.raises(ConfigError, match=r"Update\(clip=1.0\).*clip of the optimizer"):
        loop_with(Update(optimizer, clip=1.0), model)


class Counting(MLP):
    """Keeps statistics of what it computes: written in place, replaced, and not part of checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        self.passes += 1
        return super().forward(self.norm(x)) + 0 * self.passes


def counting(**config: Any) -> Loop:
    """Return a loop over a model with statistics."""
    torch.manual_seed(0)
    model = Counting()
    return loop_with(AdamW(model.parameters(), lr=1e-3, states="fp32"), model, **config)


def test_probes_leave_running_statistics_as_they_are() -> None:
    probed, plain = counting(mode="watch", shadow_every=1), counting(mode="off")
    for _ in range(4):
        assert torch.equal(probed.step(), plain.step())  # type: ignore[arg-type]
    assert probed.state.locate() is None
    assert probed.state.model.passes == probed.state.model.norm.num_batches_tracked == 4  # type: ignore[union-attr]
    for (name, buffer), expected in zip(probed.state.model.named_buffers(), plain.state.model.buffers(), strict=True):
        assert torch.equal(buffer, expected), name


def test_all_buffers_go_back_in_a_rollback() -> None:
    loop = counting(mode="act")
    loop.step()
    snapshot = loop.state.snapshot()
    kept = {name: buffer.clone() for name, buffer in loop.state.model.named_buffers()}
    losses_then = [loop.step() for _ in range(2)]
    loop.state.restore(snapshot)
    assert all(torch.equal(buffer, kept[name]) for name, buffer in loop.state.model.named_buffers())
    assert [loop.step() for _ in range(2)] == losses_then


def test_a_parameter_that_had_no_gradient_before_a_snapshot_has_no_state_after_a_rollback() -> None:
    loop, _ = make_loop()
    loop.state.model.second.weight.requires_grad_(False)  # type: ignore[union-attr]
    loop.step()
    snapshot = loop.state.snapshot()
    loop.state.model.second.weight.requires_grad_(True)  # type: ignore[union-attr]
    first = [loop.step() for _ in range(3)]
    loop.state.restore(snapshot)
    assert [loop.step() for _ in range(3)] == first


@pytest.mark.parametrize("kind", [AdamW, torch.optim.AdamW])
def test_a_learning_rate_that_is_a_tensor_stays_that_tensor(kind: Any) -> None:
    model, lr = MLP(), torch.tensor(1e-2)
    loop = loop_with(kind(model.parameters(), lr=lr), model, mode="act")
    seen: list[Any] = []
    optimizer = loop.state.update.optimizer
    optimizer.register_step_pre_hook(lambda *_: seen.append((optimizer.param_groups[0]["lr"], float(lr))))
    loop.step()
    snapshot = loop.state.snapshot()
    loop.state.lr_limit = 1e-3
    loop.step()
    assert [rate for _, rate in seen] == pytest.approx([1e-2, 1e-3])
    assert float(lr) == pytest.approx(1e-2)
    lr.fill_(5e-3)
    loop.state.restore(snapshot)
    assert float(lr) == pytest.approx(1e-2)
    loop.step()
    assert all(used is lr for used, _ in seen)


def test_a_step_that_fails_leaves_the_learning_rate_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _ = make_loop(lr=1e-2)
    loop.state.lr_limit = 1e-3
    monkeypatch.setattr(loop.state, "_loss_of", lambda *_: pytest.fail("no loss"))
    with pytest.raises(pytest.fail.Exception, match="no loss"):
        loop.step()
    assert loop.state.update.optimizer.param_groups[0]["lr"] == 1e-2
