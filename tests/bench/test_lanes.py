"""Lanes: a run is its seed's alone, arms of a block share all but the recipe, and a branch goes on from BF16."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.nn import Linear
from octavo.nn.grouped import GroupedLinear
from octavo.optim import TIERS
from octavo.recipes import Recipe
from octavo_bench import ladder
from octavo_bench.installed_text import InstalledText
from octavo_bench.lanes import (
    BF16,
    CONTROL,
    OUTLIERS_EVERY,
    GraphMemory,
    Lane,
    Snapshot,
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
from octavo_bench.parity import check_recipes

TINY = replace(ladder.SIZES["tiny"], tokens_per_parameter=0.1)
CPU = torch.device("cpu")


def text(seed: int = 0) -> InstalledText:
    ids = torch.randint(256, (20_000,), generator=torch.Generator().manual_seed(seed), dtype=torch.int16)
    return InstalledText(ids % 7, {"python": ids[:400] % 7, "english": ids[400:700] % 7}, "digest")


@pytest.fixture(scope="module")
def lanes() -> dict[str, Lane]:
    return {arm: Lane(arm, TINY, text(), CPU) for arm in (BF16, CONTROL, "folded")}


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
    bf16, control, folded = (lane.losses for lane in lanes.values())
    assert float(control[0]) == pytest.approx(float(bf16[0]), rel=1e-3)
    assert float(folded[0]) == pytest.approx(float(bf16[0]), rel=1e-2)
    assert not torch.equal(control, bf16) and not torch.equal(folded, bf16)


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


@pytest.mark.parametrize("name", ["tiny", "moe-tiny"])
def test_a_converted_arm_with_all_layers_disabled_is_bf16(name: str, lanes: dict[str, Lane]) -> None:
    """The control of the bench: what is left of FP8 after `disabled` would be a bias of every arm."""
    own = replace(ladder.SIZES[name], tokens_per_parameter=0.1)
    bf16 = lanes[BF16] if name == "tiny" else Lane(BF16, own, text(), CPU)
    for recipe in ("folded", "rotated"):
        lane = Lane(f"{recipe}+run.disabled=yes", own, text(), CPU)
        converted = [m for m in lane.model.modules() if isinstance(m, Linear | GroupedLinear)]
        assert converted and not any(module.enabled for module in converted)
        assert torch.equal(finish(lane, 0), finish(bf16, 0))
        scores = score_together([lane], bf16)[0]
        assert [*scores] == ["heldout", "heldout_bf16", "heldout_of_bf16"]
        assert all(score == bf16.heldout() for score in scores.values())


def test_disabled_is_yes_and_has_no_last_share() -> None:
    with pytest.raises(ConfigError, match="disabled is yes"):
        check_recipes(["folded+run.disabled=1"])
    with pytest.raises(ConfigError, match="last_share out"):
        check_recipes(["folded+run.disabled=yes+run.last_share=0.3"])


def test_the_options_of_a_run_that_an_arm_may_change() -> None:
    assert schedule_of("folded+run.last_share=0.2", 10).is_last(8) and not schedule_of("folded", 10).is_last(9)
    for wrong in ("2", "much"):
        with pytest.raises(ConfigError, match=r"run\.last_share"):
            schedule_of(f"folded+run.last_share={wrong}", 10)
    for wrong in ("bf16_first_steps=2", "last_recipe=nonsense"):
        with pytest.raises(ConfigError, match=wrong.split("=")[0] if "first" in wrong else "nonsense"):
            schedule_of(f"folded+run.{wrong}", 10)


@pytest.mark.parametrize(
    ("arm", "blocks"),
    [(BF16, []), ("folded", []), ("rotated", [16, 64]), ("rotated+fprop.*.rotation=16", []),
     ("rotated+fprop.*.rotation=128+fprop.*.hadamard=sylvester", [16, 64])],
)  # fmt: skip
def test_a_lane_names_the_blocks_of_its_rotations_where_they_are_smaller(arm: str, blocks: list[int]) -> None:
    own = replace(TINY, model=replace(TINY.model, dim=64, ffn=80))
    assert Lane(arm, own, text(), CPU).rotations == blocks


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
    weight = torch.randn(100, 100).bfloat16()
    moved = [weight.clone()]
    move(moved, torch.Generator().manual_seed(0), 50)
    assert 100 < int((moved[0] != weight).sum()) < 300
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
    from octavo.lab.models import build

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
    both = recipe_of("rotated+fprop.*.rotation=128+fprop.*.hadamard=sylvester").fprop
    assert both.input == both.weight and str(both.input) == "INT8 row FP32 scales rotated by Sylvester 128"
    with pytest.raises(ConfigError, match="rotated by 64 and 256"):
        recipe_of("rotated+fprop.input.rotation=64")
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        recipe_of("folded+wgrad")
    with pytest.raises(ConfigError, match=r"wgrad.*exactness"):
        recipe_of("folded+wgrad.exactness=bf16")


@pytest.fixture(scope="module", params=["tuned", "lora"])
def tuned(request: pytest.FixtureRequest) -> tuple[ladder.Training, dict[str, torch.Tensor]]:
    """Return a fine-tuning of some steps, and the weights of its base model."""
    own = ladder.under(request.param, replace(TINY, tokens_per_parameter=0.1))
    own = own.of_steps(8)
    base = Lane(BF16, own.base, text(), CPU)
    assert run_together([base], 0) and float(base.losses[-1]) < float(base.losses[0])
    return own, base.weights()


def test_a_fine_tuning_starts_from_its_base_and_is_its_seeds_alone(
    tuned: tuple[ladder.Training, dict[str, torch.Tensor]],
) -> None:
    own, base = tuned
    runs: dict[str, torch.Tensor] = {}
    for arm in (BF16, CONTROL, "folded", "rotated", "rotated+run.disabled=yes"):
        lane = Lane(arm, own, text(), CPU)
        lane.base = base
        runs[arm] = finish(lane, 0)
        if arm == "folded":  # one lane stands for all: they differ in their recipes
            assert not torch.equal(finish(lane, 1), runs[arm])  # another order of the windows
            assert torch.equal(finish(lane, 0), runs[arm])
        frozen = {name: p for name, p in lane.model.named_parameters() if not p.requires_grad}
        assert bool(frozen) == (own.tuned == "LoRA") == any(".lora." in name for name in lane.weights())
        assert all(torch.equal(p, base[name].bfloat16()) for name, p in frozen.items())
        assert {p.dtype for name, p in lane.model.named_parameters() if ".lora." not in name} == {torch.bfloat16}
    assert torch.equal(runs["rotated+run.disabled=yes"], runs[BF16])
    assert len({tuple(losses.tolist()) for losses in runs.values()}) == len(runs) - 1
    assert all(torch.allclose(losses, runs[BF16], rtol=2e-3) for losses in runs.values())


def test_the_loss_of_a_fine_tuning_is_that_of_the_second_half_of_a_window(
    tuned: tuple[ladder.Training, dict[str, torch.Tensor]],
) -> None:
    own, base = tuned
    lane = Lane(BF16, replace(own, lr=0.0), text(), CPU)
    lane.base = base
    losses, starts = finish(lane, 0), order(own, (len(text().train) - 1) // own.model.sequence, 0)[0]
    windows = text().train[starts[:, None] + torch.arange(own.model.sequence + 1)].long()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = lane.model(windows[:, :-1]).float()
    half = own.model.sequence // 2
    expected = torch.nn.functional.cross_entropy(logits[:, half:].flatten(0, 1), windows[:, 1:][:, half:].flatten())
    assert float(losses[0]) == pytest.approx(float(expected), rel=1e-3)


def test_a_fine_tuning_does_not_branch() -> None:
    with pytest.raises(ConfigError, match="starts from its base model"):
        ladder.under("half+lora", TINY)


WIDE = replace(TINY, model=replace(TINY.model, dim=64, ffn=128), branch=0.5).of_steps(8)
"""Matrices of 64 x 64 are large enough for one-byte moments."""


@pytest.fixture(scope="module")
def tiers() -> dict[str, Lane]:
    names = {name: f"folded+optimizer.states={name}" for name in ("exact", "fp8-lm", "fp8")}
    return {name: Lane(arm, WIDE, text(), CPU) for name, arm in ({"torch": "folded"} | names).items()}


@pytest.fixture(scope="module")
def branch() -> Snapshot:
    """BF16's run of seed 2, half-way."""
    bf16 = Lane(BF16, WIDE, text(), CPU)
    assert run_together([bf16], 2, until=WIDE.first)
    return bf16.snapshot()


def stored(lane: Lane) -> dict[str, dict[str, torch.Tensor]]:
    """Return the optimizer states of a lane by parameter and name."""
    return {name: lane.optimizer.state[p] for name, p in lane.model.named_parameters()}


def bytes_of(lane: Lane) -> list[torch.Tensor]:
    """Return weights and optimizer states of a lane, bit for bit."""
    states = [tensor for own in stored(lane).values() for _, tensor in sorted(own.items())]
    return [t.detach().reshape(-1).view(torch.uint8).clone() for t in (*lane.model.parameters(), *states)]


def test_the_tier_of_an_arms_moments(tiers: dict[str, Lane]) -> None:
    losses = {name: finish(lane, 0) for name, lane in tiers.items()}
    dtypes = {name: {key: own["exp_avg"].dtype for key, own in stored(lane).items()} for name, lane in tiers.items()}
    assert {*dtypes["torch"].values()} == {torch.float32}
    for name, dtype in (("exact", torch.bfloat16), ("fp8-lm", torch.float8_e4m3fn), ("fp8", torch.float8_e4m3fn)):
        assert dtypes[name]["layers.0.attention.wq.weight"] == dtype
        assert dtypes[name]["tok_embeddings.weight"] == torch.bfloat16 and dtypes[name]["norm.weight"] == torch.float32
        assert not torch.equal(losses[name], losses["torch"])
        # Moments in BF16 or FP8 change an update by percents, and so a loss after a few steps by much less.
        assert torch.allclose(losses[name], losses["torch"], rtol=1e-3), name
    assert len({tuple(own.tolist()) for own in losses.values()}) == 4


def test_beside_fp32_weights_the_smallest_tier_is_fp8() -> None:
    layouts = [
        TIERS[name].layout("adamw", torch.float32, torch.float32, stochastic=True) for name in ("fp8", "fp8-min")
    ]
    assert layouts[0] == layouts[1]
    for tier in TIERS.values():
        layout = tier.layout("adamw", torch.float32, torch.float32, stochastic=True)
        assert layout.master is None and layout.remainder_bits == 0, tier.name


@pytest.mark.parametrize("tier", ["fp8-lm", "fp8"])
def test_a_run_by_a_tier_is_that_of_a_lane_of_its_own(tiers: dict[str, Lane], branch: Snapshot, tier: str) -> None:
    """Counts, codes and scales of the run before are gone, and so are its random bits."""
    for seed, snapshot in ((0, None), (1, None), (2, branch)):
        fresh = Lane(tiers[tier].arm, WIDE, text(), CPU)
        assert torch.equal(finish(tiers[tier], seed, snapshot=snapshot), finish(fresh, seed, snapshot=snapshot))
        assert all(map(torch.equal, bytes_of(tiers[tier]), bytes_of(fresh)))
        assert {float(own["step"]) for own in stored(fresh).values()} == {WIDE.steps}


def test_experts_have_moments_of_a_tier_too() -> None:
    own = replace(ladder.SIZES["moe-tiny"], tokens_per_parameter=0.1).of_steps(4)
    lane = Lane("folded+optimizer.states=fp8", own, text(), CPU)
    first = finish(lane, 0)
    assert torch.float8_e4m3fn in {state["exp_avg"].dtype for state in stored(lane).values()}
    finish(lane, 1)
    assert torch.equal(finish(lane, 0), first)


def test_a_branch_rounds_the_moments_of_bf16_to_its_tier_in_place(tiers: dict[str, Lane], branch: Snapshot) -> None:
    lane = tiers["fp8"]
    finish(lane, 0)
    addresses = [{key: t.data_ptr() for key, t in own.items()} for own in stored(lane).values()]
    rates = [id(group["lr"]) for group in lane.optimizer.param_groups]
    lane.start(2, branch)
    assert [{key: t.data_ptr() for key, t in own.items()} for own in stored(lane).values()] == addresses
    assert [id(group["lr"]) for group in lane.optimizer.param_groups] == rates
    exported = lane.optimizer.export_state_dict()["state"]
    numbers = {p: n for n, p in enumerate(p for group in lane.optimizer.param_groups for p in group["params"])}
    for (name, parameter), moments in zip(lane.model.named_parameters(), branch.moments, strict=True):
        own, held = exported[numbers[parameter]], lane.optimizer.state[parameter]
        assert float(own["step"]) == float(held["step"]) == WIDE.first
        for key, rounded in (("exp_avg", e4m3), ("exp_avg_sq", squared_root)):
            expected = moments[key]
            if held[key].dtype == torch.bfloat16:
                expected = expected.bfloat16().float()
            elif held[key].dtype != torch.float32:
                expected = torch.from_numpy(rounded(expected.numpy()))
            assert torch.equal(own[key], expected), (name, key)


def e4m3(moment: np.ndarray) -> np.ndarray:
    """Return a matrix of at most 128 columns in E4M3 and one power of two per row, FP32."""
    scale = 2.0 ** np.ceil(np.log2(np.abs(moment).max(1, keepdims=True).astype(np.float64) / 448))
    return ((moment / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).astype(np.float32)


def squared_root(moment: np.ndarray) -> np.ndarray:
    """Return the squares of roots with four mantissa bits, exponents from -6, and one power of two per row, FP32."""
    root = np.sqrt(moment.astype(np.float64)).astype(np.float32).astype(np.float64)
    scale = 2.0 ** np.ceil(np.log2(root.max(1, keepdims=True) / 496))
    x = root / scale
    unit = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(x, 1e-30))), -6) - 4)
    rounded = np.maximum(np.rint(x / unit) * unit, np.where(x > 0, 2.0**-10, 0))  # what is not 0 stays so
    return np.square((rounded * scale).astype(np.float32))


def test_an_unknown_tier_or_option_of_the_optimizer_is_named() -> None:
    assert states_of("folded") is None and states_of(BF16) is None and states_of(CONTROL) is None
    assert states_of("folded+optimizer.states=fp8-min") == "fp8-min"
    assert recipe_of("folded+optimizer.states=fp8") == recipe_of("folded")
    with pytest.raises(ConfigError, match="Did you mean 'fp8-min'"):
        states_of("folded+optimizer.states=fp8-mini")
    with pytest.raises(ConfigError, match="Did you mean 'states'"):
        states_of("folded+optimizer.state=fp8")


@pytest.mark.parametrize("change", ["policy=low", "run=1", "optimizer=fp8", "optimizer.states.x=fp8"])
def test_a_change_outside_the_recipe_is_an_option_of_a_table(change: str) -> None:
    table = change.split("=")[0].split(".")[0]
    with pytest.raises(ConfigError, match=rf"write {table}\.OPTION=VALUE"):
        check_recipes([f"folded+{change}"])
    with pytest.raises(ConfigError, match="has a value already"):
        check_recipes([f"folded+{table}=1+{table}.other=2"])


def long_text() -> InstalledText:
    """Return text for sequences of 512 tokens."""
    own = text()
    return InstalledText(own.train.repeat(30), {"python": own.train[:1200], "english": own.train[-600:]}, "digest")


@pytest.mark.gpu
def test_a_lane_of_one_step_warms_up_within_its_order() -> None:
    """More uncaptured steps than a run has would read batches and rates behind their ends."""
    device = torch.device("cuda")
    lane = Lane(BF16, ladder.SIZES["moe-tiny"].of_steps(1), text().on(device), device)
    assert run_together([lane], 0)
    assert bool(lane.losses.isfinite().all())


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("compiled", [False, True])
def test_lanes_together_and_alone_agree_bit_for_bit(compiled: bool) -> None:
    """Graphs that replay beside each other share neither memory nor workspaces, for whole runs and branches."""
    device = torch.device("cuda")
    size = replace(ladder.SIZES["1m"], tokens_per_parameter=0.5, branch=0.5)
    own = long_text().on(device)
    with allow_many_compilations():
        lanes = [
            Lane(arm, size, own, device, compiled=compiled)
            for arm in (BF16, CONTROL, "folded", "folded+optimizer.states=fp8", "tensorwise", "block")
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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.usefixtures("deterministic")
def test_a_lane_on_another_gpu_is_the_same_run() -> None:
    """From a snapshot of the first GPU, with scores of the first's weights."""
    size, own = replace(ladder.SIZES["1m"], tokens_per_parameter=0.5, branch=0.5), long_text()
    source, *lanes = (
        Lane(arm, size, own, torch.device("cuda", index), compiled=True)
        for arm, index in ((BF16, 0), ("folded", 0), ("folded", 1))
    )
    assert run_together([source], 0, until=size.first)
    snapshot = source.snapshot()
    assert run_together([source, *lanes], 0, snapshot=snapshot)
    assert torch.equal(lanes[0].losses, lanes[1].losses) and bool(lanes[1].losses.isfinite().all())
    _, *scores = score_together([source, *lanes], source)
    assert scores[0] == scores[1] and scores[0]["heldout_of_bf16"] != scores[0]["heldout"]


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_lanes_one_by_one_share_the_memory_of_their_graphs() -> None:
    """Three arms need little more memory than one, and each run is that of a lane with memory of its own."""
    device = torch.device("cuda")
    size, own = replace(ladder.SIZES["3m"], together=False).of_steps(8), long_text().on(device)
    arms = [BF16, "folded", "folded+run.last_share=0.5"]
    alone = {arm: finish(Lane(arm, size, own, device), 0) for arm in arms}
    memory, lanes, held = GraphMemory(device), list[Lane](), list[int]()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for arm in arms:
        lanes.append(Lane(arm, size, own, device, memory=memory))
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved() - before)
    assert held[2] < 1.6 * held[0], held
    for _ in range(2):
        for lane in lanes:
            assert torch.equal(finish(lane, 0), alone[lane.arm]), lane.arm


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("tier", ["exact", "fp8-lm", "fp8"])
def test_a_replayed_step_by_a_tier_is_the_eager_one(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its count, bias corrections, rate and random bits are read on the device: a graph would repeat the host's."""
    device, arm = torch.device("cuda"), f"folded+optimizer.states={tier}"
    size, own = replace(ladder.SIZES["1m"], branch=0.5).of_steps(8), long_text().on(device)

    def uncaptured(lane: Lane, name: str, recipe: Recipe | None, work: Callable[[], None], warm_up: int) -> None:
        lane._graphs[name] = lambda: (work(), lane._clear())[0]

    bf16, replayed = Lane(BF16, size, own, device), Lane(arm, size, own, device)
    monkeypatch.setattr(Lane, "_capture", uncaptured)
    eager = Lane(arm, size, own, device)
    assert run_together([bf16], 2, until=size.first)
    for seed, snapshot in ((0, None), (1, None), (2, bf16.snapshot())):
        assert run_together([replayed], seed, snapshot=snapshot) and run_together([eager], seed, snapshot=snapshot)
        assert bool(eager.losses.isfinite().all()) and torch.equal(replayed.losses, eager.losses)
        assert all(map(torch.equal, bytes_of(replayed), bytes_of(eager)))
        assert {float(state["step"]) for state in stored(replayed).values()} == {size.steps}


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_a_tier_and_another_recipe_at_the_end_are_captured() -> None:
    """Two graphs hold the step of one optimizer, whose tables neither may overwrite."""
    device = torch.device("cuda")
    size, own = ladder.SIZES["1m"].of_steps(8), long_text().on(device)
    lane = Lane("folded+optimizer.states=fp8+run.last_share=0.5", size, own, device)
    first = finish(lane, 0)
    assert bool(first.isfinite().all()) and torch.equal(finish(lane, 0), first)
