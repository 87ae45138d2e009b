"""Lanes: a run is its seed's alone, arms of a block share all but the recipe, and a branch goes on from BF16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from octavo.errors import ConfigError
from octavo.nn import Linear
from octavo_bench import ladder
from octavo_bench.installed_text import InstalledText
from octavo_bench.lanes import (
    BF16,
    NULL,
    OUTLIERS_EVERY,
    Lane,
    add_outliers,
    allow_many_compilations,
    initial_weights,
    move,
    order,
    recipe_of,
    run_together,
    schedule_of,
    score_together,
    states_of,
)

TINY = replace(ladder.SIZES["tiny"], tokens_per_parameter=0.1)
CPU = torch.device("cpu")


def text(seed: int = 0) -> InstalledText:
    ids = torch.randint(256, (20_000,), generator=torch.Generator().manual_seed(seed), dtype=torch.int16)
    return InstalledText(ids % 7, {"python": ids[:400] % 7, "english": ids[400:700] % 7}, "digest")


@pytest.fixture(scope="module")
def lanes() -> dict[str, Lane]:
    return {arm: Lane(arm, TINY, text(), CPU) for arm in (BF16, NULL, "folded")}


def finish(lane: Lane, seed: int, **options: object) -> torch.Tensor:
    assert run_together([lane], seed, **options)  # type: ignore[arg-type]
    return lane.losses


def test_a_run_depends_on_its_seed_and_not_on_the_run_before(lanes: dict[str, Lane]) -> None:
    for lane in lanes.values():
        first = finish(lane, 0)
        heldout = lane.heldout()
        other = finish(lane, 1)
        assert not torch.equal(first, other)
        assert torch.equal(finish(lane, 0), first)
        assert lane.heldout() == heldout and set(heldout) == {"python", "english"}


def test_lanes_together_are_what_they_are_alone(lanes: dict[str, Lane]) -> None:
    alone = {arm: finish(lane, 3) for arm, lane in lanes.items()}
    assert run_together([*lanes.values()], 3)
    assert all(torch.equal(lane.losses, alone[arm]) for arm, lane in lanes.items())


def test_arms_of_a_block_begin_alike_and_differ(lanes: dict[str, Lane]) -> None:
    assert run_together([*lanes.values()], 0)
    bf16, null, folded = (lane.losses for lane in lanes.values())
    assert float(null[0]) == pytest.approx(float(bf16[0]), rel=1e-3)
    assert float(folded[0]) == pytest.approx(float(bf16[0]), rel=1e-2)
    assert not torch.equal(null, bf16) and not torch.equal(folded, bf16)


def test_bf16_branched_from_itself_is_the_whole_run(lanes: dict[str, Lane]) -> None:
    bf16, folded = lanes[BF16], lanes["folded"]
    whole = finish(bf16, 0)
    half = replace(TINY, branch=0.5)
    bf16.training = folded.training = half
    try:
        assert run_together([bf16], 0, until=half.first)
        snapshot = bf16.snapshot()
        assert int(snapshot.at) == half.first > 0
        assert torch.equal(finish(bf16, 0, snapshot=snapshot), whole)
        branched = finish(folded, 0, snapshot=snapshot)
        assert torch.equal(branched[: half.first], whole[: half.first])
        assert not torch.equal(branched[half.first :], whole[half.first :])
        assert float(branched[half.first]) == pytest.approx(float(whole[half.first]), rel=1e-2)
    finally:
        bf16.training = folded.training = TINY


@pytest.mark.parametrize("arm", [BF16, "folded"])
def test_the_balance_of_experts_belongs_to_a_run(arm: str) -> None:
    own = replace(ladder.SIZES["moe-tiny"], tokens_per_parameter=0.1, branch=0.5)
    bf16, lane = Lane(BF16, own, text(), CPU), Lane(arm, own, text(), CPU)
    mixture = lane.model.get_submodule("layers.0.feed_forward")
    first = finish(lane, 0)
    assert bool(mixture.get_buffer("bias").any()) and not mixture.get_buffer("counts").any()
    finish(lane, 1)
    assert torch.equal(finish(lane, 0), first)
    assert run_together([bf16], 0, until=own.first)
    snapshot = bf16.snapshot()
    branched = finish(lane, 0, snapshot=snapshot)
    assert torch.equal(branched, first) == (arm == BF16)
    lane.start(0, snapshot)
    assert torch.equal(mixture.get_buffer("bias"), snapshot.buffers["layers.0.feed_forward.bias"])


def test_a_run_stops_at_the_deadline(lanes: dict[str, Lane]) -> None:
    assert not run_together([lanes[BF16]], 0, deadline=0.0)


def test_weights_in_bf16_are_scored_beside_those_in_fp8(lanes: dict[str, Lane]) -> None:
    finish(lanes["folded"], 0)
    assert lanes["folded"].evaluations == ["heldout", "heldout_bf16"] and lanes[BF16].evaluations == ["heldout"]
    own, in_bf16 = lanes["folded"].heldout(), lanes["folded"].heldout("heldout_bf16")
    assert own != in_bf16 and own == pytest.approx(in_bf16, rel=1e-2)


def test_the_end_of_a_run_by_another_recipe(lanes: dict[str, Lane]) -> None:
    in_fp8, at = finish(lanes["folded"], 0), TINY.steps - round(0.5 * TINY.steps)
    for ending in (BF16, "rowwise_bf16_fprop"):
        own = lanes.get(ending) or Lane(ending, TINY, text(), CPU)
        whole, half = (Lane(f"folded+run.last_share={s}+run.last_recipe={ending}", TINY, text(), CPU) for s in (1, 0.5))
        assert torch.equal(finish(whole, 0), finish(own, 0))
        losses = finish(half, 0)
        assert torch.equal(losses[:at], in_fp8[:at]) and not torch.equal(losses[at:], in_fp8[at:])
        assert torch.equal(finish(half, 0), losses)  # it begins in FP8 again


def test_a_run_that_ends_by_another_recipe_is_scored_by_both(lanes: dict[str, Lane]) -> None:
    lane = Lane("folded+run.last_share=0.5", TINY, text(), CPU)
    finish(lane, 0)
    found = score_together([lane], lanes[BF16])[0]
    assert [*found] == ["heldout", "heldout_bf16", "heldout_fp8", "heldout_of_bf16"]
    assert found["heldout"] == found["heldout_bf16"] != found["heldout_fp8"]  # an evaluation is fprop alone
    assert found["heldout_of_bf16"] == score_together([lanes["folded"]], lanes[BF16])[0]["heldout_of_bf16"]


def test_the_options_of_a_run_that_an_arm_may_change() -> None:
    assert schedule_of("folded+run.last_share=0.2", 10).is_last(8) and not schedule_of("folded", 10).is_last(9)
    for wrong in ("2", "much"):
        with pytest.raises(ConfigError, match=r"run\.last_share"):
            schedule_of(f"folded+run.last_share={wrong}", 10)
    for wrong in ("bf16_first_steps=2", "last_recipe=nonsense"):
        with pytest.raises(ConfigError, match=wrong.split("=")[0] if "first" in wrong else "nonsense"):
            schedule_of(f"folded+run.{wrong}", 10)


def test_an_arm_may_leave_blocks_and_layers_in_bf16() -> None:
    def in_fp8(arm: str) -> set[str]:
        model = Lane(arm, two_blocks, text(), CPU).model
        return {name.split(".", 1)[1] for name, m in model.named_modules() if isinstance(m, Linear)}

    two_blocks = replace(TINY, model=replace(TINY.model, layers=2))
    every = in_fp8("folded")
    assert in_fp8("folded+policy.bf16_blocks=1/0") == {name for name in every if name.startswith("1.")}
    assert in_fp8("folded+policy.keep=*.wo/*.w2") == {n for n in every if not n.endswith((".wo", ".w2"))} < every
    for wrong in ("bf16_blocks=one", "bf16_blocks=1", "keeps=*.wo", "keep=*.w9"):
        with pytest.raises(ConfigError, match=r"bf16_blocks|keep"):
            in_fp8(f"folded+policy.{wrong}")


def test_fp8_scores_the_weights_of_bf16_too(lanes: dict[str, Lane]) -> None:
    bf16, folded = lanes[BF16], lanes["folded"]
    assert run_together([bf16, folded], 0)
    own, crossed = folded.heldout(), score_together([bf16, folded], bf16)
    assert crossed[0] == {"heldout": bf16.heldout()}
    assert [*crossed[1]] == ["heldout", "heldout_bf16", "heldout_of_bf16"] and crossed[1]["heldout"] == own
    assert folded.heldout("heldout_bf16") == bf16.heldout()  # its weights are BF16's now
    assert folded.heldout() == crossed[1]["heldout_of_bf16"] not in (own, bf16.heldout())


def test_a_moved_weight_is_finite_and_one_unit_of_bf16_away() -> None:
    """Seed 0 of 1 M and 3 M draws one direction that is 0: it once made a weight NaN, and the pilot lost the pair."""
    for size in ("1m", "3m"):
        weights = initial_weights(ladder.SIZES[size].model, 0)
        moved = [weight.clone() for weight in weights.values()]
        move(moved, torch.Generator().manual_seed(2**20))
        for before, after in zip(weights.values(), moved, strict=True):
            assert bool(after.isfinite().all())
            unit = 2.0 ** (torch.floor(torch.log2(before.abs().double())) - 7)
            assert torch.equal(
                ((after.double() - before.double()).abs() / unit).round(decimals=3), torch.ones_like(unit)
            )
            assert 0.4 < (after > before).double().mean() < 0.6 or before.numel() < 1000
    zero = torch.zeros(3)
    move([zero], torch.Generator())
    assert torch.equal(zero, torch.zeros(3))


def test_passes_over_the_text_have_orders_of_their_own() -> None:
    windows = TINY.steps * TINY.batch // 2
    starts = order(TINY, windows, 0).flatten() // TINY.model.sequence
    first, second = starts[:windows], starts[windows : 2 * windows]
    assert sorted(first.tolist()) == list(range(windows)) and not torch.equal(first, second)
    assert not torch.equal(order(TINY, windows, 1), order(TINY, windows, 0))


def test_rates_rise_and_fall_to_zero() -> None:
    rates = ladder.SIZES["1m"].rates()
    assert int(rates.argmax()) == 55 and float(rates.max()) == pytest.approx(3e-3)
    assert rates[-1] < 1e-5 and bool((rates[56:].diff() < 0).all())


@pytest.mark.parametrize("name", [*ladder.SIZES])
def test_a_training_is_cut_to_a_number_of_steps(name: str) -> None:
    """Of a mixture of experts tokens per parameter count active ones."""
    assert [ladder.SIZES[name].of_steps(steps).steps for steps in (1, 3, 8)] == [1, 3, 8]


def test_outliers_change_activations_and_not_the_function_but_for_the_gates() -> None:
    from octavo.models import build

    config = ladder.SIZES["1m"].model
    plain, hard = build(config, 0).eval(), build(config, 0).eval()
    add_outliers(hard, 16.0)
    for block, own in zip(
        plain.get_submodule("layers").children(), hard.get_submodule("layers").children(), strict=True
    ):
        gate, up = (own.get_parameter(f"feed_forward.{name}.weight") for name in ("w1", "w3"))
        assert torch.equal(gate[::OUTLIERS_EVERY], up[::OUTLIERS_EVERY])
        with torch.no_grad():  # the gates back as they were, so that the rest can be compared
            gate[::OUTLIERS_EVERY] = block.get_parameter("feed_forward.w1.weight")[::OUTLIERS_EVERY]
            gate[::OUTLIERS_EVERY, ::OUTLIERS_EVERY] /= 16
    seen: list[torch.Tensor] = []
    hard.get_submodule("layers.0.attention.wq").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    ids = torch.arange(64)[None] % 256
    assert torch.allclose(hard(ids), plain(ids), rtol=1e-3, atol=1e-4)
    large = seen[0].abs().mean((0, 1))
    assert large[::OUTLIERS_EVERY].mean() > 8 * large.median()


def test_an_arm_is_a_recipe_and_what_differs_from_it() -> None:
    assert recipe_of("folded").name == "folded"
    changed = recipe_of("folded+wgrad.precision=bf16+dgrad.grad_output.format=e4m3")
    assert (
        changed.name.startswith("folded+") and not changed.wgrad.is_fp8 and changed.dgrad.grad_output.format == "e4m3"
    )
    assert recipe_of("tensorwise+fprop.input.granularity=row").fprop.input.granularity == "row"
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        recipe_of("folded+wgrad")
    with pytest.raises(ConfigError, match=r"wgrad.*exactness"):
        recipe_of("folded+wgrad.exactness=bf16")


WIDE = replace(TINY, model=replace(TINY.model, dim=64, ffn=128))
"""Matrices of 64 x 64 are large enough for one-byte moments."""


@pytest.fixture(scope="module")
def tiers() -> dict[str, Lane]:
    names = {name: f"folded+optimizer.states={name}" for name in ("fp32", "fp8")}
    return {name: Lane(arm, WIDE, text(), CPU) for name, arm in ({"torch": "folded"} | names).items()}


def test_the_tier_of_an_arms_moments(tiers: dict[str, Lane]) -> None:
    losses = {name: finish(lane, 0) for name, lane in tiers.items()}
    assert torch.allclose(losses["fp32"], losses["torch"], rtol=3e-4)  # embeddings and heads are `exact`, not FP32
    assert not torch.equal(losses["fp8"], losses["torch"])
    assert torch.allclose(losses["fp8"], losses["torch"], rtol=2e-2)
    stored = {
        name: tiers["fp8"].optimizer.state[p]["exp_avg"].dtype for name, p in tiers["fp8"].model.named_parameters()
    }
    assert stored["layers.0.attention.wq.weight"] == torch.float8_e4m3fn
    assert stored["tok_embeddings.weight"] == torch.bfloat16 and stored["norm.weight"] == torch.float32


def test_moments_of_a_tier_belong_to_a_run(tiers: dict[str, Lane]) -> None:
    lane = tiers["fp8"]
    first = finish(lane, 0)
    assert not torch.equal(finish(lane, 1), first)
    assert torch.equal(finish(lane, 0), first)


def test_a_branch_rounds_the_moments_of_bf16_to_its_tier_in_place(tiers: dict[str, Lane]) -> None:
    bf16, lane = Lane(BF16, WIDE, text(), CPU), tiers["fp8"]
    assert run_together([bf16], 2, until=4)
    snapshot = bf16.snapshot()
    finish(lane, 0)
    before = {id(t): t.data_ptr() for state in lane.optimizer.state.values() for t in state.values()}
    lane.start(2, snapshot)
    after = {id(t): t.data_ptr() for state in lane.optimizer.state.values() for t in state.values()}
    assert after == before
    exported = lane.optimizer.export_state_dict()["state"]
    order = [p for group in lane.optimizer.param_groups for p in group["params"]]
    for parameter, expected in zip(lane.model.parameters(), snapshot.moments, strict=True):
        own = exported[next(i for i, p in enumerate(order) if p is parameter)]
        assert float(own["step"]) == 4
        for name in ("exp_avg", "exp_avg_sq"):
            error = (own[name] - expected[name]).norm() / expected[name].norm()
            one_byte = lane.optimizer.state[parameter][name].dtype != torch.float32
            assert (0.001 < error < 0.05) if one_byte else error == 0, (name, error)


def test_an_unknown_tier_or_option_of_the_optimizer_is_named() -> None:
    assert states_of("folded") is None and states_of(BF16) is None
    assert states_of("folded+optimizer.states=fp8-min") == "fp8-min"
    with pytest.raises(ConfigError, match="Did you mean 'fp8-min'"):
        states_of("folded+optimizer.states=fp8-mini")
    with pytest.raises(ConfigError, match="Did you mean 'states'"):
        states_of("folded+optimizer.state=fp8")


@contextmanager
def deterministic() -> Iterator[None]:
    """Let no backward add in any order: that of fused attention does, most of all beside another stream.

    `warn_only` leaves it so, and without it products want an environment variable from the start of the process.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_a_lane_of_one_step_warms_up_within_its_order() -> None:
    """More uncaptured steps than a run has would read batches and rates behind their ends."""
    device = torch.device("cuda")
    lane = Lane(BF16, ladder.SIZES["moe-tiny"].of_steps(1), text().on(device), device)
    assert run_together([lane], 0)
    assert bool(lane.losses.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_lanes_together_and_alone_agree_bit_for_bit(compiled: bool) -> None:
    """Graphs that replay beside each other share neither memory nor workspaces, for whole runs and branches."""
    device = torch.device("cuda")
    size = replace(ladder.SIZES["1m"], tokens_per_parameter=0.5, branch=0.5)
    own = text()
    own = InstalledText(own.train.repeat(30), {"python": own.train[:1200], "english": own.train[-600:]}, "digest").on(
        device
    )
    with allow_many_compilations(), deterministic():
        lanes = [
            Lane(arm, size, own, device, compiled=compiled)
            for arm in (BF16, NULL, "folded", "folded+optimizer.states=fp8", "tensorwise", "block")
        ]
        assert run_together(lanes[:1], 0, until=size.first)
        snapshot = lanes[0].snapshot()
        for start in (None, snapshot):
            assert run_together(lanes, 0, snapshot=start)
            together = [(lane.losses, lane.heldout()) for lane in lanes]
            for lane, expected in zip(lanes, together, strict=True):
                assert run_together([lane], 0, snapshot=start)
                assert torch.equal(lane.losses, expected[0]) and lane.heldout() == expected[1], lane.arm
                assert bool(lane.losses.isfinite().all()) and bool((lane.losses > 0).all())
        assert torch.equal(together[0][0], finish(lanes[0], 0))
