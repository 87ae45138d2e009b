"""Every GEMM against float64, from the same codes and scales, in every size.

The bound, throughout: products of two FP8 codes are exact in FP32, so that only adding and scaling round. Adding K
terms in any order is off by at most (K - 1) 2^-24 of the sum of magnitudes |a| . |b|^T (Higham, Accuracy and
Stability, 4.2), and up to four more roundings scale operands and result: (K + 3) 2^-24. It is a worst case; errors
seen are far below it.
"""

from contextlib import nullcontext
from itertools import product

import pytest
import torch

from octavo import kernels
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.gemm import KERNELS, GemmKernel, _choose, _gemm, choose
from octavo.kernels.gemm.reference import gemm as reference_gemm
from octavo.kernels.gemm.vendor import cpu_unsupported_reason
from octavo.kernels.runtime.dispatch import fake_mode, planning_for
from octavo.nn import Linear
from octavo.numerics import PER_ROW, Quantized
from octavo.recipes import load, names

UNIT = 2.0**-24
ROW, TENSOR = ("reference",) * 2 if cpu_unsupported_reason() else ("scaled_mm.row", "scaled_mm.tensor")
SIZES = [(1, 1, 1), (3, 5, 7), (16, 16, 16), (17, 33, 130), (128, 256, 384), (1, 200, 129), (65, 1, 127)]
every_size = pytest.mark.parametrize(("m", "n", "k"), SIZES, ids=lambda v: str(v))


def as_the_gemm_gets_it(operand) -> tuple[str, str, str]:
    """A folded operand arrives with scale 1 for all of it."""
    return operand.format, "tensor" if operand.is_folded else operand.granularity, operand.scaling


PAIRS = sorted({(as_the_gemm_gets_it(a), as_the_gemm_gets_it(b)) for name in names() for _, a, b in load(name).gemms()})
every_pair = pytest.mark.parametrize(("left", "right"), PAIRS, ids=lambda v: "-".join(v))


def operands(m: int, n: int, k: int, left, right) -> tuple[Quantized, Quantized]:
    """Quantise two matrices whose rows and columns have magnitudes of their own, so that no two scales are alike."""
    a = torch.randn(m, k) * torch.exp(2 * torch.randn(m, 1)) * torch.exp(torch.randn(1, k))
    b = torch.randn(n, k) * torch.exp(2 * torch.randn(n, 1)) * torch.exp(torch.randn(1, k))
    return kernels.quantize(a, *left), kernels.quantize(b, *right)


def test_the_pairs_are_those_of_the_presets():
    # row-row, row-tensor (folded), tensor-tensor (E4M3, E5M2), 1x128 by 128x128, 1x128 by 1x128, 1x32-1x32
    # the last two by FP32 and by engines' scales too
    # and INT8 rows
    assert len(PAIRS) == 12


@every_size
@every_pair
def test_gemm_is_float64s_up_to_fp32_sums(m, n, k, left, right, oracle):
    a, b = operands(m, n, k, left, right)
    exact, magnitude = oracle(a, b)
    y = kernels.gemm(a, b, torch.float32)
    assert y.shape == (m, n) and y.dtype == torch.float32 and y.is_contiguous()
    assert bool(((y - exact).abs() <= (k + 3) * UNIT * magnitude).all())


@every_pair
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_results_are_the_fp32_result_rounded_once(left, right, dtype):
    a, b = operands(33, 48, 80, left, right)
    y = kernels.gemm(a, b, torch.float32)
    step = torch.finfo(dtype).eps * y.abs() + torch.finfo(dtype).smallest_normal
    assert kernels.gemm(a, b, dtype).dtype == dtype
    in_range = y.abs() < torch.finfo(dtype).max
    assert bool(((kernels.gemm(a, b, dtype) - y).abs() <= step / 2 * (1 + 2.0**-8))[in_range].all())


@every_pair
def test_reference_and_the_kernel_chosen_agree(left, right):
    # Same codes, same scales; what differs is the order of FP32 sums, and where the scales are multiplied in: each is
    # within (K + 3) 2^-24 of |a| . |b|^T of the exact result, so they are within twice that of one another.
    a, b = operands(70, 50, 300, left, right)
    magnitude = reference_gemm(Quantized(a.codes.abs(), *a[1:]), Quantized(b.codes.abs(), *b[1:]), torch.float32)
    difference = (kernels.gemm(a, b, torch.float32) - reference_gemm(a, b, torch.float32)).abs()
    assert bool((difference <= 2 * 303 * UNIT * magnitude).all())


@every_pair
def test_small_integers_are_exact(left, right):
    # Codes and sums below 2^24 leave nothing to round: every kernel must give the very same integers.
    a, b = torch.randint(-4, 5, (20, 150)).float(), torch.randint(-4, 5, (30, 150)).float()
    a[:, 0] = b[:, 0] = 4.0  # one amax for all
    quantized = [kernels.quantize(x, operand[0], operand[1]) for x, operand in ((a, left), (b, right))]
    assert torch.equal(kernels.gemm(*quantized, torch.float32), a @ b.t())


@every_pair
@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0), (0, 5, 0)], ids=str)
def test_empty_sizes_give_zeros_and_run_no_kernel(m, n, k, left, right):
    a, b = kernels.quantize(torch.randn(m, k), *left), kernels.quantize(torch.randn(n, k), *right)
    with kernels.record() as ledger:
        y = kernels.gemm(a, b, torch.bfloat16)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, torch.zeros(m, n, dtype=torch.bfloat16))
    assert not ledger.gemms


@every_pair
def test_rule_3_nan_reaches_its_row_and_column_and_no_other(left, right):
    a, b = torch.randn(20, 150), torch.randn(30, 150)
    a[3, 5] = torch.nan
    b[7, 140] = torch.inf
    y = kernels.gemm(kernels.quantize(a, *left), kernels.quantize(b, *right), torch.float32)
    expected = torch.zeros(20, 30, dtype=torch.bool)
    expected[3], expected[:, 7] = True, True
    assert torch.equal(y.isnan(), expected)


def test_rule_6_padding_changes_no_sum(oracle):
    # The largest codes right at a ragged edge, in every odd size around a multiple of 16.
    for size in (15, 17, 31, 33):
        x = torch.full((size, size), 448.0)
        a = kernels.quantize(x, "e4m3", "row")
        assert torch.equal(kernels.gemm(a, a, torch.float32), torch.full((size, size), 448.0**2 * size))


@pytest.mark.parametrize("name", ["rows", "0x128"])
def test_unknown_granularity(name):
    codes, scale = torch.zeros(2, 2).to(torch.float8_e4m3fn), torch.ones(1, 1)
    with pytest.raises(ConfigError, match="unknown granularity"):
        torch.ops.octavo.gemm(codes, scale, name, codes, scale, "tensor", torch.float32, False)


# --- who runs -------------------------------------------------------------------------------------------------------


def probe(granularity: str, fmt: str = "e4m3") -> Quantized:
    return kernels.quantize(torch.ones(32, 256), fmt, granularity)


@pytest.mark.parametrize(
    ("left", "right", "kernel"),
    [
        ("tensor", "tensor", TENSOR),
        ("row", "row", ROW),
        ("row", "tensor", ROW),
        ("tensor", "row", ROW),
        ("1x128", "128x128", "reference"),
        ("1x128", "1x128", "reference"),
        ("1x32", "1x32", "emulated.1x32"),
        ("row", "1x128", "reference"),
        ("column", "row", "reference"),
    ],
)
def test_choice_on_a_cpu(left, right, kernel):
    chosen, refused = choose(probe(left), probe(right))
    assert chosen.name == kernel
    before = [k.name for k in KERNELS][: [k.name for k in KERNELS].index(kernel)]
    assert list(refused) == before
    assert all(refused.values()), "every refusal has a reason"


def test_reasons_are_the_real_ones():
    _, refused = choose(probe("1x128"), probe("128x128"))
    assert refused == {
        "int8": "its operands are not INT8",
        "scaled_mm.tensor": "its operands have more than one scale",
        "scaled_mm.row": "its operands are not scaled by row",
        "scaled_mm.block": "PyTorch has no block-scaled GEMM for a CPU",
        "scaled_mm.mx": "its operands are not scaled by groups of 1x32",
        "emulated.1x32": "it emulates 1x32 by 1x32 scales only",
    }
    _, refused = choose(probe("128x128"), probe("128x128"))
    assert refused["scaled_mm.block"].startswith("its operands are not 1x128 by 128x128")
    _, refused = choose(probe("1x128", "e5m2"), probe("128x128"))
    assert refused["scaled_mm.block"] == "block scales take E4M3 operands only"


def test_int8_is_exact_whatever_the_length_of_its_sums():
    # 17 pieces of K whose sums exceed 2^24, which FP32 could not add exactly
    k = 17_000
    a, b = torch.full((3, k), 127, dtype=torch.int8), torch.randint(-127, 128, (5, k), dtype=torch.int8)
    b[0] = 127
    scales = torch.rand(3, 1), torch.rand(5, 1)
    y = kernels.gemm(Quantized(a, scales[0], PER_ROW), Quantized(b, scales[1], PER_ROW), torch.float32)
    sums = (a.long() @ b.long().t()).float()
    assert torch.equal(y, sums * scales[0] * scales[1].t())
    assert sums[0, 0] > 2**24


def test_int8_takes_no_other_operands():
    a = kernels.quantize(torch.randn(4, 32), "int8", "row")
    assert choose(a, a)[0].name == "int8"
    assert choose(a, kernels.quantize(torch.randn(4, 32), "e4m3", "row"))[1]["int8"] == "its operands are not INT8"
    long = Quantized(torch.zeros(1, 133_145, dtype=torch.int8), torch.ones(1, 1), PER_ROW)
    assert choose(long, long)[1]["int8"] == "sums over more than 133,144 products may exceed INT32"


def test_compiled_gemm_is_the_eager_one():
    a, b = operands(33, 48, 80, ("e4m3", "row"), ("e4m3", "row"))
    compiled = torch.compile(lambda: kernels.gemm(a, b, torch.bfloat16), backend="aot_eager", fullgraph=True)
    with kernels.record() as ledger:
        assert torch.equal(compiled(), kernels.gemm(a, b, torch.bfloat16))
    assert ledger.gemms == {ROW: 2}


@every_pair
def test_autocast_does_not_reach_into_a_gemm(left, right):
    # A training step calls it under autocast: operands with FP32 scales must not be rounded to BF16 on the way.
    a, b = operands(33, 48, 80, left, right)
    expected = kernels.gemm(a, b, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(kernels.gemm(a, b, torch.float32), expected)


def test_the_operator_is_well_formed():
    a, b = operands(5, 4, 6, ("e4m3", "row"), ("e4m3", "tensor"))
    torch.library.opcheck(_gemm.operator, _gemm.encode(a, b, torch.float32, False), test_utils="test_faketensor")


# --- by a named accumulator -----------------------------------------------------------------------------------------

HOPPERS_PAIRS = [pair for pair in PAIRS if "1x32" not in (pair[0][1], pair[1][1])]


@every_size
@every_pair
def test_exact_is_float64_rounded_once(m, n, k, left, right, oracle):
    a, b = operands(m, n, k, left, right)
    with kernels.gemm_by("exact"):
        y = kernels.gemm(a, b, torch.float32)
    exact, magnitude = oracle(a, b)
    assert bool(((y - exact).abs() <= UNIT * exact.abs() + k * 2.0**-52 * magnitude).all())


@pytest.mark.covering(2)
@every_size
@pytest.mark.parametrize(("left", "right"), HOPPERS_PAIRS, ids=lambda v: "-".join(v))
@pytest.mark.parametrize("name", ["hopper-slow", "hopper-fast"])
def test_hopper_is_near_float64_and_never_rounds_up(name, m, n, k, left, right, oracle):
    # At worst 33 cuts of 2^-13 a step, in as many steps as there are 32 in K: of the magnitude of the sum so far.
    a, b = operands(m, n, k, left, right)
    a, b = (Quantized(x.codes.float().abs().to(x.codes.dtype), *x[1:]) for x in (a, b))
    with kernels.gemm_by(name):
        y = kernels.gemm(a, b, torch.float32)
    exact, _ = oracle(a, b)
    assert bool((y <= exact * (1 + 2.0**-21)).all())
    assert bool((y >= exact * (1 - 34 * 2.0**-13 * -(-k // 32))).all())


@pytest.mark.parametrize(("left", "right"), HOPPERS_PAIRS, ids=lambda v: "-".join(v))
@pytest.mark.parametrize("name", ["slow", "hopper", "hopper-slow", "hopper-fast", "exact"])
def test_small_integers_are_exact_by_any_accumulator(name, left, right):
    a, b = torch.randint(-4, 5, (20, 150)).float(), torch.randint(-4, 5, (30, 150)).float()
    a[:, 0] = b[:, 0] = 4.0
    quantized = [kernels.quantize(x, operand[0], operand[1]) for x, operand in ((a, left), (b, right))]
    with kernels.gemm_by(name):
        assert torch.equal(kernels.gemm(*quantized, torch.float32), a @ b.t())


def test_hopper_is_fast_where_it_is_asked_to_be():
    a, b = (kernels.quantize(torch.rand(4, 700) + 1, "e4m3", "row") for _ in range(2))

    def by(name: str, accumulate: str) -> torch.Tensor:
        with kernels.gemm_by(name):
            return kernels.gemm(a, b, torch.float32, accumulate)

    assert torch.equal(by("hopper", "fast"), by("hopper-fast", "slow"))
    assert torch.equal(by("hopper", "slow"), by("hopper-slow", "fast"))
    assert bool((by("hopper", "fast") < by("hopper", "slow")).all())


def test_slow_takes_the_usual_kernel_and_forbids_it_to_be_fast(monkeypatch):
    seen = []
    spy = GemmKernel(
        "spy", lambda a, b: None, lambda a, b, dtype, fast: seen.append(fast) or reference_gemm(a, b, dtype)
    )
    monkeypatch.setitem(choose.__globals__, "KERNELS", (spy,))
    monkeypatch.setitem(choose.__globals__, "_choices", {})
    a = probe("row")
    kernels.gemm(a, a, torch.float32, "fast")
    with kernels.gemm_by("slow"):
        kernels.gemm(a, a, torch.float32, "fast")
    assert seen == [True, False]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_an_accumulator_holds_in_backward_and_in_compiled_code_until_its_block_ends(compiled):
    layer = Linear(64, 32)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x = torch.randn(8, 64, requires_grad=True)
    with kernels.record() as ledger:
        with pytest.raises(ZeroDivisionError), kernels.gemm_by("hopper"):
            with kernels.gemm_by("exact"):
                run(x).sum().backward()
            run(x).sum().backward()
            _ = 1 / 0
        run(x).sum().backward()
    assert ledger.gemms == {"exact": 3, "hopper": 3, ROW: 3}
    torch._dynamo.reset()


def test_an_unknown_accumulator_and_operands_it_does_not_take():
    with pytest.raises(ConfigError, match=r"'hoper-slow'. Did you mean 'hopper-slow'"), kernels.gemm_by("hoper-slow"):
        pass
    a = probe("1x32")
    with pytest.raises(UnsupportedError, match="no tensor core of Hopper takes 1x32 scales"), kernels.gemm_by("hopper"):
        kernels.gemm(a, a, torch.float32)
    assert kernels.gemm(a, a, torch.float32)[0, 0] == 256


# --- on a GPU -------------------------------------------------------------------------------------------------------


def on_gpu(x: Quantized) -> Quantized:
    return Quantized(x.codes.cuda(), x.scale.cuda(), x.granularity)


@pytest.mark.gpu
@every_size
@every_pair
def test_gpu_gemm_against_float64(m, n, k, left, right, oracle):
    # Hopper adds 32 products and what it has so far at 13 fraction bits below the largest of them, truncated: at worst
    # 33 truncations of 2^-13 of the sum of magnitudes. Row scales come out in BF16, half a step of 2^-7 on top.
    a, b = operands(m, n, k, left, right)
    exact, magnitude = oracle(a, b)
    with kernels.record() as ledger:
        y = kernels.gemm(on_gpu(a), on_gpu(b), torch.float32).cpu().double()
    assert bool(((y - exact).abs() <= 33 * 2.0**-13 * magnitude + 2.0**-8 * exact.abs()).all())
    assert "reference" not in ledger.gemms and not ledger.fallbacks


@pytest.mark.gpu
@every_pair
def test_gpu_gemm_is_right_in_the_mean(left, right, oracle):
    a, b = operands(300, 200, 1000, left, right)
    exact, _ = oracle(a, b)
    y = kernels.gemm(on_gpu(a), on_gpu(b), torch.bfloat16).cpu().double()
    noise = ((y - exact).square().sum() / exact.square().sum()).sqrt()
    assert noise < 2.0**-8  # rounding to BF16 gives 2^-9 at worst, 2^-10 or so in the mean


@pytest.mark.gpu
@pytest.mark.parametrize(("left", "right"), [("tensor", "tensor"), ("row", "row")])
def test_rule_5_slow_accumulation_keeps_a_coherent_sum_and_fast_does_not(left, right, oracle):
    k = 14336
    a, b = (kernels.quantize(torch.rand(rows, k) + 0.5, "e4m3", g) for rows, g in ((128, left), (256, right)))
    exact, _ = oracle(a, b)
    slow, fast = (
        float(((kernels.gemm(on_gpu(a), on_gpu(b), torch.float32, mode).cpu() - exact) / exact).mean().abs())
        for mode in ("slow", "fast")
    )
    assert slow < 1e-3
    assert fast > 3 * slow and fast > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("left", "right"),
    [("tensor", "tensor"), ("row", "row"), ("row", "tensor"), ("1x128", "128x128"), ("1x128", "1x128")],
)
@pytest.mark.parametrize("accumulate", ["slow", "fast"])
def test_the_emulated_accumulator_is_the_gpus_own(left, right, accumulate):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not Hopper")
    a, b = (on_gpu(kernels.quantize(torch.randn(2048, 1024) + 0.3, "e4m3", g)) for g in (left, right))
    own = kernels.gemm(a, b, torch.bfloat16, accumulate)
    with kernels.gemm_by("hopper"):
        assert torch.equal(kernels.gemm(a, b, torch.bfloat16, accumulate), own)


@pytest.mark.gpu
def test_rule_7_a_fallback_on_a_gpu_is_written_down_with_its_reason():
    a, b = (on_gpu(kernels.quantize(torch.randn(64, 128), "e4m3", granularity)) for granularity in ("1x32", "row"))
    with kernels.record() as ledger:
        kernels.gemm(a, b, torch.bfloat16)
        kernels.gemm(a, b, torch.bfloat16)
    assert ledger.gemms == {"reference": 2}
    assert len(ledger.fallbacks) == 1
    assert "1x32 x row ran as reference: scaled_mm.block: its operands are not" in ledger.fallbacks[0]


@pytest.mark.parametrize("switch", ["gemm_by", "gemm_by fast", "planning", "fake"])
def test_a_choice_is_kept_with_all_that_it_depends_on(switch):
    block = {
        "gemm_by": lambda: kernels.gemm_by("exact"),
        "gemm_by fast": lambda: kernels.gemm_by("hopper-fast"),
        "planning": lambda: planning_for("b200"),
        "fake": fake_mode,
    }[switch]
    formats, tiles = ("e4m3", "e5m2", "int8"), ("tensor", "row", "1x128", "128x128")
    operands = [probe(tile, fmt) for fmt in formats for tile in tiles]
    operands.append(Quantized(torch.zeros(1, 133_145, dtype=torch.int8), torch.ones(1, 1), PER_ROW))
    for where in (nullcontext, block, nullcontext):
        with where():
            for a, b in product(operands, operands):
                assert choose(a, b) == _choose(a, b)
