"""Quantise against an oracle that shares no code with it (conftest.py), around every rounding boundary."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from octavo.errors import ConfigError
from octavo.numerics import (
    E4M3,
    E5M2,
    PER_COLUMN,
    PER_ROW,
    PER_TENSOR,
    BLOCK_128x128,
    Granularity,
    GROUP_1x32,
    Quantized,
    TILE_1x128,
    dequantize,
    quantize,
    to_codes,
)

TWIN = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
GRANULARITIES = [
    PER_TENSOR,
    PER_ROW,
    PER_COLUMN,
    TILE_1x128,
    BLOCK_128x128,
    GROUP_1x32,
    Granularity(128, 1),
    Granularity(3, 5),
]
every_format = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
every_granularity = pytest.mark.parametrize("granularity", GRANULARITIES, ids=lambda g: g.name)
every_scaling = pytest.mark.parametrize("scaling", ["power_of_two", "float32"])
matrices = arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 9)), elements=st.floats(-1e4, 1e4, width=32))


def values_of(fmt) -> np.ndarray:
    """Return the finite, non-negative values of a format in order, as ml_dtypes decodes them."""
    values = np.arange(128, dtype=np.uint8).view(TWIN[fmt.name]).astype(np.float64)
    return np.sort(values[np.isfinite(values)])


def boundaries(fmt) -> np.ndarray:
    """Return the values, the midpoints between them, and where rounding would go beyond the largest value."""
    values = values_of(fmt)
    beyond = 2 * values[-1] - values[-2]
    return np.concatenate([values, (values[1:] + values[:-1]) / 2, [(values[-1] + beyond) / 2, beyond]])


def with_neighbours(x: np.ndarray) -> np.ndarray:
    """Return FP32 values, the next FP32 value on either side of each, and all of these with a minus."""
    x = x.astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    return np.concatenate([x, -x])


def uint8(codes: torch.Tensor) -> np.ndarray:
    return codes.view(torch.uint8).numpy()


def assert_same_codes(codes: np.ndarray, expected: np.ndarray, fmt) -> None:
    """Bit for bit, signed zeros included; any NaN code is as good as another."""
    nan = np.isnan(expected.view(TWIN[fmt.name]).astype(np.float32))
    np.testing.assert_array_equal(np.isnan(codes.view(TWIN[fmt.name]).astype(np.float32)), nan)
    np.testing.assert_array_equal(codes[~nan], expected[~nan])


# --- to_codes -------------------------------------------------------------------------------------------------------


@every_format
def test_rule_4_nearest_even_at_every_boundary(fmt, oracle_codes):
    x = with_neighbours(boundaries(fmt))
    assert_same_codes(uint8(to_codes(torch.from_numpy(x), fmt)), oracle_codes(x, fmt.name), fmt)


@every_format
def test_rule_4_random_doubles_around_every_boundary(fmt, oracle_codes):
    # 60 doubles at every boundary, from one FP32 step away to a whole gap away, rounded to FP32 first, as quantize
    # does.
    random = np.random.default_rng(0)
    edges = np.concatenate([boundaries(fmt), -boundaries(fmt)])[:, None]
    x = edges + np.maximum(np.abs(edges), fmt.smallest_subnormal) * random.normal(
        size=(1, 60)
    ) * 2.0 ** -random.integers(1, 26, 60)
    x = x.astype(np.float32).ravel()
    assert_same_codes(uint8(to_codes(torch.from_numpy(x), fmt)), oracle_codes(x, fmt.name), fmt)


@every_format
def test_rule_4_ties_go_to_the_even_code(fmt):
    # Said once without any oracle: halfway between two neighbouring codes lies the one whose last bit is 0.
    values = values_of(fmt)
    codes = uint8(to_codes(torch.from_numpy(((values[1:] + values[:-1]) / 2).astype(np.float32)), fmt))
    np.testing.assert_array_equal(codes, [k + k % 2 for k in range(len(values) - 1)])


@every_format
def test_rule_4_finite_values_saturate(fmt):
    top = fmt.max
    beyond = [
        top,
        np.nextafter(np.float32(top), np.float32(np.inf)),
        top * 17 / 16,
        top * 1.5,
        2 * top,
        1e30,
        3.4028235e38,
    ]
    x = torch.tensor([float(v) for v in beyond])
    assert torch.equal(to_codes(x, fmt).float(), torch.full_like(x, top))
    assert torch.equal(to_codes(-x, fmt).float(), torch.full_like(x, -top))


@every_format
def test_subnormals_zeros_and_what_flushes(fmt):
    half = fmt.smallest_subnormal / 2
    x = torch.tensor([0.0, -0.0, half, -half, half * (1 + 2.0**-23), half / 2, 2.0**-149, -(2.0**-149)])
    codes = uint8(to_codes(x, fmt)).tolist()
    assert codes == [0x00, 0x80, 0x00, 0x80, 0x01, 0x00, 0x00, 0x80]  # half is a tie, and 0 is even


@every_format
def test_rule_3_nan_and_infinities_are_never_saturated_away(fmt):
    # Infinities become NaN in both formats: a compiled cast to E5M2 would make them finite.
    codes = to_codes(torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf]), fmt).float()
    assert bool(codes.isnan().all())


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value(fmt, dtype, oracle_codes):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    assert_same_codes(uint8(to_codes(x, fmt)), oracle_codes(x.float().numpy(), fmt.name), fmt)


@every_format
def test_monotone(fmt):
    x = torch.from_numpy(np.sort(with_neighbours(boundaries(fmt))))
    assert bool((to_codes(x, fmt).float().diff() >= 0).all())


# --- quantize -------------------------------------------------------------------------------------------------------


@every_scaling
@every_granularity
@every_format
@pytest.mark.parametrize("shape", [(5, 7), (130, 257)], ids=str)
def test_codes_and_scales_are_the_oracles(fmt, granularity, scaling, shape, oracle):
    x = torch.randn(shape) * torch.exp(3 * torch.randn(shape[0], 1)) * torch.exp(3 * torch.randn(1, shape[1]))
    quantized = quantize(x, fmt, granularity, scaling)
    codes, scales = oracle(x.numpy(), fmt.name, (granularity.rows or shape[0], granularity.cols or shape[1]), scaling)
    np.testing.assert_array_equal(quantized.scale.numpy(), scales)
    np.testing.assert_array_equal(uint8(quantized.codes), codes)
    assert quantized.codes.dtype == fmt.dtype and quantized.scale.dtype == torch.float32
    assert quantized.granularity == granularity


@every_granularity
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_input_gives_the_codes_of_its_fp32_copy(granularity, dtype):
    x = torch.randn(40, 150).to(dtype)
    narrow, wide = quantize(x, E4M3, granularity), quantize(x.float(), E4M3, granularity)
    assert torch.equal(narrow.scale, wide.scale)
    np.testing.assert_array_equal(uint8(narrow.codes), uint8(wide.codes))


@every_granularity
@every_format
def test_rule_3_nan_and_infinities_keep_their_place_and_spare_their_neighbours(fmt, granularity):
    x = torch.randn(130, 140)
    poisoned = x.clone()
    poisoned[2, 3], poisoned[129, 139], poisoned[0, 128] = torch.nan, torch.inf, -torch.inf
    x[2, 3] = x[129, 139] = x[0, 128] = 0.0
    clean, dirty = quantize(x, fmt, granularity), quantize(poisoned, fmt, granularity)
    assert torch.equal(clean.scale, dirty.scale)
    changed = np.argwhere(uint8(clean.codes) != uint8(dirty.codes)).tolist()
    assert changed == [[0, 128], [2, 3], [129, 139]]
    assert np.argwhere(dequantize(dirty).isnan().numpy()).tolist() == changed


@every_scaling
@given(x=matrices)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_transposing_commutes_with_quantising(scaling, x):
    for granularity in (PER_TENSOR, PER_ROW, PER_COLUMN, Granularity(2, 3)):
        one = quantize(torch.from_numpy(x), E4M3, granularity, scaling)
        other = quantize(torch.from_numpy(x).t(), E4M3, granularity.transposed, scaling).t()
        assert other.granularity == granularity
        assert torch.equal(one.scale, other.scale)
        np.testing.assert_array_equal(uint8(one.codes), uint8(other.codes.contiguous()))


@every_format
@given(x=matrices)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_idempotent_with_power_of_two_scales(fmt, x):
    # The values stay; the codes may be another notation of them, for where the amax was rounded down the scale may
    # halve.
    for granularity in (PER_TENSOR, PER_ROW, TILE_1x128):
        once = dequantize(quantize(torch.from_numpy(x), fmt, granularity))
        assert torch.equal(dequantize(quantize(once, fmt, granularity)), once)


@every_format
@given(x=matrices)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_dequantise_is_exact_in_bf16_with_power_of_two_scales(fmt, x):
    # Codes have at most 4 significant bits, BF16 has 8; its exponents reach down to 2^-133, and these inputs stay
    # above.
    x = torch.from_numpy(np.where(np.abs(x) < 1e-20, 0, x))
    quantized = quantize(x, fmt, PER_ROW)
    exact = quantized.codes.double() * quantized.scale.double()
    assert torch.equal(dequantize(quantized, torch.bfloat16).double(), exact)
    assert torch.equal(dequantize(quantized).double(), exact)


@every_scaling
@every_format
@given(x=matrices)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_monotone_and_odd(fmt, scaling, x):
    row = torch.from_numpy(np.sort(x.reshape(1, -1)))
    restored = dequantize(quantize(row, fmt, PER_ROW, scaling))
    assert bool((restored.diff() >= 0).all())
    assert torch.equal(dequantize(quantize(-row, fmt, PER_ROW, scaling)), -restored)


@every_scaling
@every_format
@given(x=matrices)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_error_is_at_most_half_a_step(fmt, scaling, x):
    x = torch.from_numpy(x)
    quantized = quantize(x, fmt, PER_ROW, scaling)
    error = (dequantize(quantized).double() - x.double()).abs()
    scale = quantized.scale.double()
    half_step = torch.maximum(x.double().abs() * fmt.epsilon / 2, scale * fmt.smallest_subnormal / 2)
    assert bool((error <= half_step * (1 + 2.0**-20)).all())  # FP32 scales: a few FP32 roundings on top


@every_scaling
@every_format
def test_with_its_own_scale_nothing_saturates_and_the_largest_uses_the_last_binade(fmt, scaling):
    quantized = quantize(torch.randn(200, 33), fmt, PER_ROW, scaling)
    largest = quantized.codes.float().abs().amax(dim=1)
    assert bool((largest >= fmt.max / 2).all())


@every_granularity
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)], ids=str)
def test_empty_matrices(granularity, shape):
    quantized = quantize(torch.empty(shape), E5M2, granularity)
    assert quantized.codes.shape == shape and quantized.codes.dtype == E5M2.dtype
    assert quantized.scale.shape == granularity.scale_shape(*shape)
    assert dequantize(quantized, torch.bfloat16).shape == shape


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4), ()], ids=str)
def test_only_matrices(shape):
    with pytest.raises(ConfigError, match=r"takes a matrix, got shape .*: flatten the leading dimensions first"):
        quantize(torch.zeros(shape))


def test_input_is_left_alone():
    x = torch.randn(5, 9)
    before = x.clone()
    quantize(x, E4M3, TILE_1x128)
    assert torch.equal(x, before)


def test_quantized_transposes_as_a_view():
    quantized = quantize(torch.randn(6, 130), E4M3, TILE_1x128)
    transposed = quantized.t()
    assert transposed.granularity == Granularity(128, 1)
    assert transposed.codes.data_ptr() == quantized.codes.data_ptr()
    assert torch.equal(dequantize(transposed), dequantize(quantized).t())


def test_dequantise_of_a_matrix_made_by_hand():
    codes = torch.tensor([[1.0, -2.0, 3.0], [0.5, 448.0, 0.0]]).to(E4M3.dtype)
    assert dequantize(Quantized(codes, torch.tensor([[2.0], [0.25]]), PER_ROW)).tolist() == [
        [2, -4, 6],
        [0.125, 112, 0],
    ]


# --- stochastic rounding --------------------------------------------------------------------------------------------


def stochastic(x: torch.Tensor, fmt, seed: int) -> torch.Tensor:
    """Return what stochastic rounding gives at scale 1: a last row of the largest value fixes the scale."""
    anchored = torch.cat([x, torch.full((1, x.shape[1]), fmt.max)])
    quantized = quantize(anchored, fmt, PER_TENSOR, rounding="stochastic", seed=seed)
    assert quantized.scale.item() == 1.0
    return quantized.codes[:-1].float()


@every_format
@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9])
def test_rule_4_stochastic_rounding_is_unbiased(fmt, share):
    count = 40_000
    values = values_of(fmt)
    places = [0, 1, 2**fmt.mantissa_bits - 1, 40, len(values) - 2]  # zero, subnormal, its end, normal, the last gap
    for place in places:
        low, high = values[place], values[place + 1]
        for sign in (1, -1):
            x = torch.full((1, count), sign * float(np.float32(low + share * (high - low))))
            rounded = stochastic(x, fmt, seed=place).double()
            assert set(rounded.unique().tolist()) <= {sign * low, sign * high}
            standard_error = (high - low) * (share * (1 - share) / count) ** 0.5
            assert abs(rounded.mean().item() - x[0, 0].item()) < 4 * standard_error


@every_format
def test_stochastic_rounding_never_moves_an_exact_value(fmt):
    values = torch.from_numpy(np.concatenate([values_of(fmt), -values_of(fmt)])).float()[None]
    for seed in range(20):
        assert torch.equal(stochastic(values, fmt, seed), values)


@every_format
@pytest.mark.parametrize("bits", [0, (1 << 32) - 1], ids=["least", "most"])
def test_stochastic_rounding_at_the_ends_of_the_random_numbers(fmt, bits, monkeypatch):
    # The least number rounds up whatever is not exact, the most rounds it down; exact values stay under both.
    monkeypatch.setitem(quantize.__globals__, "random_bits", lambda seed, shape, device: torch.full(shape, bits))
    values = torch.from_numpy(values_of(fmt)).float()
    assert torch.equal(stochastic(values[None], fmt, 0)[0], values)
    middles = (values[1:] + values[:-1]) / 2
    assert torch.equal(stochastic(middles[None], fmt, 0)[0], values[1:] if bits == 0 else values[:-1])


@every_format
def test_stochastic_rounding_goes_to_a_neighbour(fmt):
    values = values_of(fmt)
    x = torch.from_numpy(np.random.default_rng(0).uniform(-fmt.max, fmt.max, (1, 5000))).float()
    x[:, ::2] *= 2.0 ** -torch.randint(0, 40, (2500,)).float()
    rounded = stochastic(x, fmt, 9)[0].double().numpy()
    magnitude = x[0].double().abs().numpy()
    above = np.searchsorted(values, magnitude)
    below = np.where(values[above] == magnitude, above, above - 1)
    assert bool(np.all((np.abs(rounded) == values[above]) | (np.abs(rounded) == values[below])))
    assert bool(np.all((rounded == 0) | (np.sign(rounded) == np.sign(x[0].numpy()))))


def test_same_seed_same_codes_another_seed_others():
    x = torch.randn(30, 50)
    first, again, other = (quantize(x, rounding="stochastic", seed=seed).codes.view(torch.uint8) for seed in (4, 4, 5))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_stochastic_rounding_keeps_the_scale():
    x = torch.randn(30, 50)
    assert torch.equal(quantize(x, rounding="stochastic").scale, quantize(x).scale)


@every_format
def test_rule_3_holds_for_stochastic_rounding(fmt):
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0]])
    stochastically, nearest = (quantize(x, fmt, PER_ROW, rounding=r).codes for r in ("stochastic", "nearest"))
    assert_same_codes(uint8(stochastically), uint8(nearest), fmt)


# --- compiled, and on a GPU -----------------------------------------------------------------------------------------


def difficult(shape: tuple[int, int]) -> torch.Tensor:
    """Return a matrix with every kind of FP32 value: all exponents, subnormals, zeros, NaN, infinities."""
    random = np.random.default_rng(1)
    x = random.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)
    x = np.where(random.random(shape) < 0.5, random.normal(size=shape).astype(np.float32), x)
    x[0] = random.integers(0, 1 << 23, shape[1], dtype=np.uint32).view(np.float32)  # a row of FP32 subnormals
    x[1] = 0.0
    return torch.from_numpy(x)


def assert_same(one: Quantized, other: Quantized, fmt) -> None:
    assert torch.equal(one.scale.cpu(), other.scale.cpu())
    assert_same_codes(uint8(one.codes.cpu()), uint8(other.codes.cpu()), fmt)


@pytest.mark.covering(1)
@every_scaling
@every_granularity
def test_same_codes_through_a_compiler(granularity, scaling):
    x = difficult((130, 140))
    compiled = torch.compile(quantize, backend="aot_eager", fullgraph=True)
    assert_same(compiled(x, E4M3, granularity, scaling), quantize(x, E4M3, granularity, scaling), E4M3)
    torch._dynamo.reset()


def test_same_stochastic_codes_through_a_compiler():
    x = difficult((130, 140))
    compiled = torch.compile(quantize, backend="aot_eager", fullgraph=True)
    arguments = (E5M2, PER_ROW, "power_of_two", "stochastic", 3)
    assert_same(compiled(x, *arguments), quantize(x, *arguments), E5M2)
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@every_scaling
@every_granularity
@every_format
def test_same_codes_on_a_gpu(fmt, granularity, scaling, rounding):
    for x in (difficult((130, 261)), torch.randn(64, 300, dtype=torch.bfloat16)):
        on_cpu = quantize(x, fmt, granularity, scaling, rounding, seed=3)
        assert_same(quantize(x.cuda(), fmt, granularity, scaling, rounding, seed=3), on_cpu, fmt)


@pytest.mark.gpu
@every_scaling
@every_granularity
@every_format
def test_same_codes_on_a_gpu_through_inductor(fmt, granularity, scaling):
    compiled = torch.compile(quantize, fullgraph=True)
    for x in (difficult((130, 261)), torch.randn(64, 300, dtype=torch.bfloat16)):
        assert_same(compiled(x.cuda(), fmt, granularity, scaling), quantize(x, fmt, granularity, scaling), fmt)
    torch._dynamo.reset()


@pytest.mark.gpu
@every_format
def test_every_boundary_on_a_gpu(fmt):
    x = torch.from_numpy(with_neighbours(boundaries(fmt)))
    assert_same_codes(uint8(to_codes(x.cuda(), fmt).cpu()), uint8(to_codes(x, fmt)), fmt)


def test_formats_and_granularities_by_name():
    x = torch.randn(4, 256)
    named, object_ = quantize(x, "e5m2", "1x128"), quantize(x, E5M2, TILE_1x128)
    assert torch.equal(named.codes.float(), object_.codes.float()) and torch.equal(named.scale, object_.scale)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("e3m4",), r"unknown format 'e3m4'\. Did you mean"),
        (("e4m3", "rows"), r"unknown granularity 'rows'\. Did you mean 'row'"),
        (("e4m3", "row", "fp32"), "unknown scaling 'fp32'"),
        (("e4m3", "row", "float32", "stochastics"), r"unknown rounding 'stochastics'\. Did you mean 'stochastic'"),
    ],
)
def test_names_that_are_unknown(arguments, message):
    with pytest.raises(ConfigError, match=message):
        quantize(torch.randn(4, 4), *arguments)


def test_a_list_is_no_matrix():
    with pytest.raises(ConfigError, match="takes a matrix as a tensor, got list"):
        quantize([[1.0]])
