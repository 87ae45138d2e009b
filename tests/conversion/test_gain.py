"""The predicted gain behaves as the machine does: it grows with the size, and passes cost what they move."""

import functools
import itertools
import re
from pathlib import Path

import pytest

from octavo.conversion import gain
from octavo.kernels.runtime.devices import H200
from octavo.recipes import load
from octavo_bench import results

predicted_gain = functools.partial(gain.predicted_gain, rates=H200)

SIZES = [256, 512, 1024, 2048, 4096, 8192, 16384]
FP8 = ["folded", "rowwise", "tensorwise", "block"]


def test_bf16_gains_nothing():
    assert predicted_gain(load("bf16"), 4096, 4096, 8192) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["out_features", "in_features", "tokens"])
def test_it_grows_with_every_size(recipe, axis):
    for small, large in itertools.pairwise(SIZES):
        shape = [4096, 4096, 8192]
        shape[axis] = small
        less = predicted_gain(load(recipe), *shape)
        shape[axis] = large
        assert predicted_gain(load(recipe), *shape) > less > 0


@pytest.mark.parametrize("recipe", FP8)
def test_it_nears_the_ratio_of_the_rates_and_never_passes_it(recipe):
    # The GEMM rates of measured-h200.md over BF16's 670 TFLOP/s: what is left when passes cost nothing.
    limit = {"folded": 1160, "rowwise": 1160, "tensorwise": 1190, "block": 880}[recipe] / 670
    assert predicted_gain(load(recipe), 4096, 14336, 16384) < limit
    assert predicted_gain(load(recipe), 1 << 24, 1 << 24, 1 << 24) == pytest.approx(limit, rel=1e-2)


@pytest.mark.parametrize("size", SIZES)
def test_block_is_below_rowwise_and_rowwise_below_folded(size):
    block, rowwise, folded = (predicted_gain(load(name), size, size, 8192) for name in ("block", "rowwise", "folded"))
    assert block < rowwise < folded


def test_small_layers_lose_and_large_ones_gain():
    for recipe in FP8:
        assert predicted_gain(load(recipe), 256, 256, 8192) < 1
    assert predicted_gain(load("folded"), 14336, 4096, 16384) > 1.4


def test_every_gemm_left_in_bf16_costs_gain():
    shape = (8192, 8192, 16384)
    whole = predicted_gain(load("folded"), *shape)
    one = predicted_gain(load({"wgrad": {"precision": "bf16"}}), *shape)
    two = predicted_gain(load({"wgrad": {"precision": "bf16"}, "dgrad": {"precision": "bf16"}}), *shape)
    assert whole > one > two > 1


def test_worked_out_by_hand():
    # tensorwise, N = K = M = 1000: 2e9 operations a GEMM. Quantised: x, w and dy, 5 bytes per element; transposed: w,
    # x and dy, 2 bytes per element: 21 MB.
    bf16 = 2e9 / 670e12
    expected = 3 * bf16 / (3 * 2e9 / 1190e12 + 21e6 / 4200e9)
    assert predicted_gain(load("tensorwise"), 1000, 1000, 1000) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("recipe", ["folded", "rowwise", "block"])
def test_a_convolution_costs_more_than_the_linear_layer_of_its_size(recipe):
    linear, one, nine = (predicted_gain(load(recipe), 1024, 9216, 65536, taps) for taps in (0, 1, 9))
    assert nine < one <= linear
    assert predicted_gain(load(recipe), 2048, 9 * 2048, 16384, 9) > 1 > predicted_gain(load(recipe), 64, 576, 16384, 9)


def test_a_convolution_worked_out_by_hand():
    # folded, M = 1000000, N = 1000, K = 9 * 100. An element of the patches: the codes of fprop and of wgrad, a byte
    # written each, 4 / 9 and 2 / 9 read, and the gradient's 4 bytes; of the weight 3 + 2 bytes; of dy 3 + 3.
    flops, patches = 2e6 * 1000 * 900, 1e6 * 900
    moved = patches * (2 + 6 / 9 + 4) + 1000 * 900 * 5 + 1e6 * 1000 * 6
    expected = (3 * flops / 670e12) / (3 * flops / 1160e12 + moved / 4200e9)
    assert predicted_gain(load("folded"), 1000, 900, 1000000, 9) == pytest.approx(expected, rel=1e-12)


def test_what_is_too_small_for_the_host_gains_less_the_smaller_it_is():
    for sizes in ({"taps": 9}, {"batch": 2}):
        quarter, whole = (predicted_gain(load("folded"), 256, 576, tokens, **sizes) for tokens in (64, 256))
        assert whole == pytest.approx(4 * quarter) and whole < 0.1


def test_batches_gain_where_their_kernel_has_large_tiles():
    small, large = (predicted_gain(load("folded"), size, size, size, batch=8) for size in (2032, 4096))
    assert small < 0.5 and large > 1
    assert predicted_gain(load("block"), 1024, 1024, 1024, batch=64) < 0.1  # a loop


def test_a_batch_in_bf16_gains_nothing():
    assert predicted_gain(load("bf16"), 64, 64, 64, batch=8) == pytest.approx(1.0, rel=1e-12)


def test_fast_accumulation_speeds_up_the_products_that_have_it() -> None:
    slow, fast = (gain.predicted_ms(load(name), 4096, 4096, 16384, rates=H200) for name in ("folded", "folded_fast"))
    product = 2 * 4096 * 4096 * 16384 / (H200.row * 1e9)
    assert slow - fast == pytest.approx(2 * product * (1 - 1 / H200.fast))  # fprop and dgrad


def test_the_gain_of_experts_is_near_that_measured():
    measured = results.newest("moe", Path(__file__).parents[2] / "benchmarks/results")
    found = {}
    for row in (row for result in measured for row in result.rows):
        shape = re.fullmatch(r"(\d+) x (\d+) x (\d+), top (\d+), (\d+) tokens", row["workload"])
        recipe = row["implementation"].removeprefix("octavo ")
        if shape and recipe in ("folded", "folded_fast"):
            dim, hidden, experts, top, tokens = map(int, shape.groups())
            shapes = (2 * hidden, dim), (dim, hidden)
            predicted = gain.predicted_gain_of_experts(load(recipe), *shapes, experts, tokens * top, rates=H200)
            found[recipe, tokens] = predicted / row["ratio_to_bf16"]
    assert len(found) == 4 and all(0.95 < ratio < 1.05 for ratio in found.values()), found


def test_few_rows_do_not_pay_for_quantising_all_experts():
    shapes = (1536, 2048), (2048, 768)
    gains = [gain.predicted_gain_of_experts(load("folded"), *shapes, 128, 2**n, rates=H200) for n in range(10, 20)]
    assert gains == sorted(gains) and gains[0] < 1 < gains[-1] < 1.5
