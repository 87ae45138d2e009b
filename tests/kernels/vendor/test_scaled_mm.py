"""What `_scaled_mm` needs done around it: refusals, padding, and the layout of block scales."""

import itertools

import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType
from torch.torch_version import TorchVersion

from octavo import kernels
from octavo.kernels.gemm import vendor as scaled_mm
from octavo.numerics import BLOCK_128x128, Quantized, TILE_1x128, dequantize, granularity_named, to_e8m0

on_a_cpu = pytest.mark.skipif(
    scaled_mm.cpu_unsupported_reason() is not None, reason="this PyTorch has no FP8 GEMM for the CPU"
)
SHAPES = [(128, 128), (1, 32), (130, 257), (64, 4096), (300, 96)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mx_scales_lie_where_blackwell_reads_them(shape):
    """Bit by bit, against cuBLAS's formula for each scale."""
    x = kernels.quantize(torch.randn(shape) * torch.exp2(torch.randint(-40, 40, (shape[0], 1))), "e4m3", "1x32")
    laid_out = scaled_mm.swizzled_mx_scale(x)
    assert laid_out.dtype == torch.float8_e8m0fnu and laid_out.dim() == 1 and laid_out.is_contiguous()
    codes = to_e8m0(x.scale)
    rows, groups = codes.shape
    tiles = -(-groups // 4)
    expected = torch.full((-(-rows // 128) * 128 * tiles * 4,), 127, dtype=torch.uint8)  # 2^0 fills up
    for row, group in itertools.product(range(rows), range(groups)):
        tile = row // 128 * tiles + group // 4
        expected[512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + group % 4] = codes[row, group]
    assert torch.equal(laid_out.view(torch.uint8), expected)


@pytest.mark.parametrize("shape", [(128, 256, 128), (17, 70, 33)], ids=str)
def test_the_mx_product_gives_pytorch_what_its_checks_ask_for(monkeypatch, shape):
    """Unrun on a device: the operator is replaced by the product of what it was given, read as Blackwell would."""
    rows, depth, cols = shape

    def stand_in(a, b, scale_a, recipe_a, scale_b, recipe_b, *, swizzle_a, swizzle_b, output_dtype):
        assert (
            recipe_a == recipe_b == ScalingType.BlockWise1x32 and swizzle_a == swizzle_b == SwizzleType.SWIZZLE_32_4_4
        )
        assert a.is_contiguous() and b.t().is_contiguous() and not (a.shape[1] % 16 or b.shape[1] % 16)
        values = []
        for codes, scale in ((a, scale_a), (b.t(), scale_b)):
            groups = -(-codes.shape[1] // 32)
            assert scale.numel() == -(-codes.shape[0] // 128) * 128 * -(-groups // 4) * 4  # ScaledBlas.cpp
            tiles = scale.float().view(-(-codes.shape[0] // 128), -(-groups // 4), 32, 4, 4).permute(0, 3, 2, 1, 4)
            each = tiles.reshape(-(-codes.shape[0] // 128) * 128, -1)[: codes.shape[0], :groups]
            values.append(codes.double() * each.repeat_interleave(32, 1)[:, : codes.shape[1]].double())
        return (values[0] @ values[1].t()).to(output_dtype)

    monkeypatch.setattr(scaled_mm.F, "scaled_mm", stand_in)
    monkeypatch.setattr(scaled_mm, "_pad", lambda x, *multiples: padded(x, *multiples))
    a, b = (kernels.quantize(torch.randn(n, depth), "e4m3", "1x32") for n in (rows, cols))
    y = scaled_mm.scaled_mm_mx(a, b, torch.bfloat16, False)
    assert torch.equal(y, (dequantize(a).double() @ dequantize(b).double().t()).bfloat16())


def padded(codes: torch.Tensor, *multiples: int) -> torch.Tensor:
    missing = [-extent % multiple for extent, multiple in zip(codes.shape, multiples, strict=True)]
    return torch.nn.functional.pad(codes.view(torch.uint8), (0, missing[1], 0, missing[0])).view(codes.dtype)


def test_mx_refuses_what_is_not_1x32_or_not_blackwell():
    pair = probe("1x32"), probe("1x32")
    assert scaled_mm.unsupported_reason_mx(probe("row"), pair[1]) == "its operands are not scaled by groups of 1x32"
    assert "Blackwell" in scaled_mm.unsupported_reason_mx(*pair)
    assert scaled_mm.unsupported_reason_mx(probe("1x32", "e5m2"), pair[1]) == "Octavo's MXFP8 is E4M3 only"


def probe(granularity: str, fmt: str = "e4m3", shape: tuple[int, int] = (32, 256)) -> Quantized:
    return kernels.quantize(torch.randn(shape), fmt, granularity)


@pytest.mark.parametrize("granularity", ["row", "column", "1x128", "128x128", "1x32"])
def test_tensor_refuses_more_than_one_scale(granularity):
    for pair in ((probe(granularity), probe("tensor")), (probe("tensor"), probe(granularity))):
        assert scaled_mm.unsupported_reason_tensor(*pair) == "its operands have more than one scale"


@pytest.mark.parametrize("granularity", ["column", "1x128", "128x128", "1x32"])
def test_row_refuses_other_tiles(granularity):
    for pair in ((probe(granularity), probe("row")), (probe("row"), probe(granularity))):
        assert scaled_mm.unsupported_reason_row(*pair) == "its operands are not scaled by row"


def test_a_cpu_has_the_gemm_from_pytorch_2_13_on_at_the_latest():
    reason = scaled_mm.cpu_unsupported_reason()
    if TorchVersion(torch.__version__) >= "2.13":
        assert reason is None
    assert reason is None or reason.startswith("this PyTorch's _scaled_mm takes no row scales on a CPU (")


def test_both_formats_run_on_a_cpu_that_has_the_gemm():
    reason = scaled_mm.cpu_unsupported_reason()
    for fmt in ("e4m3", "e5m2"):
        assert scaled_mm.unsupported_reason_tensor(probe("tensor", fmt), probe("tensor")) == reason
        assert scaled_mm.unsupported_reason_row(probe("row", fmt), probe("row")) == reason


def test_a_cpu_is_probed_also_where_another_device_is_the_default(monkeypatch):
    def no_rows(*operands, **given):
        assert all(x.device.type == "cpu" for x in operands)
        raise RuntimeError("INTERNAL ASSERT FAILED, please report a bug to PyTorch. Per-tensor scaling only.\nTrace")

    monkeypatch.setattr(torch, "_scaled_mm", no_rows)
    scaled_mm.cpu_unsupported_reason.cache_clear()
    with torch.device("meta"):
        reason = scaled_mm.cpu_unsupported_reason()
    assert reason == "this PyTorch's _scaled_mm takes no row scales on a CPU (Per-tensor scaling only.)"
    scaled_mm.cpu_unsupported_reason.cache_clear()


@on_a_cpu
def test_a_cpu_gets_a_scale_for_each_row(monkeypatch):
    """With one scale each, oneDNN takes a thousand times as long on a processor with AMX."""
    shapes, plain = [], torch._scaled_mm
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda *a, **k: (shapes.append([x.shape for x in a[2:]]), plain(*a, **k))[1]
    )
    a, b = probe("tensor"), probe("tensor", shape=(48, 256))
    y = scaled_mm.scaled_mm_tensor(a, b, torch.float32, False)
    assert shapes == [[(32, 1), (1, 48)]]
    expected = dequantize(a).double() @ dequantize(b).double().t()
    assert (y.double() - expected).norm() < 1e-6 * expected.norm()


@on_a_cpu
@pytest.mark.parametrize(("rows", "cols"), [(32, 48), (1, 48), (32, 1), (1, 1)])
def test_a_side_of_1_may_have_the_stride_0(rows, cols):
    """Inductor of PyTorch 2.14 gives it to scales that are views, and `_scaled_mm` refuses it."""
    a, b = probe("row", shape=(rows, 256)), probe("row", shape=(cols, 256))
    expected = scaled_mm.scaled_mm_row(a, b, torch.float32, False)
    a, b = (x._replace(scale=x.scale.as_strided(x.scale.shape, (int(x.scale.shape[0] > 1), 0))) for x in (a, b))
    assert torch.equal(scaled_mm.scaled_mm_row(a, b, torch.float32, False), expected)


@pytest.mark.parametrize(
    ("left", "right"), [("128x128", "128x128"), ("row", "128x128"), ("1x32", "128x128"), ("1x128", "128x1")]
)
def test_block_refuses_pairs_that_cublas_has_not(left, right):
    assert scaled_mm.unsupported_reason_block(probe(left), probe(right)).startswith(
        "its operands are not 1x128 by 128x128"
    )


@pytest.mark.parametrize("shape", [(128, 128), (130, 257), (1, 1), (256, 513), (640, 128)], ids=str)
def test_tile_scales_are_laid_out_with_the_kept_index_contiguous(shape):
    x = probe("1x128", shape=shape)
    rows, cols = (-(-extent // 128) * 128 for extent in shape)
    laid_out = scaled_mm._block_scale(x, rows, cols)
    assert laid_out.shape == (rows, cols // 128)
    assert laid_out.stride(0) == 1 and (cols == 128 or laid_out.stride(1) == rows)
    assert torch.equal(laid_out[: shape[0], : x.scale.shape[1]], x.scale)
    assert bool((laid_out[shape[0] :] == 1).all())


@pytest.mark.parametrize("shape", [(128, 128), (130, 257), (1, 1), (256, 513), (640, 128)], ids=str)
def test_block_scales_are_padded_to_four_along_the_sum(shape):
    x = probe("128x128", shape=shape)
    rows, cols = (-(-extent // 128) * 128 for extent in shape)
    laid_out = scaled_mm._block_scale(x, rows, cols)
    padded = -(-(cols // 128) // 4) * 4
    assert laid_out.shape == (padded, rows // 128)
    assert laid_out.stride(0) == 1 and (rows == 128 or laid_out.stride(1) == padded)
    assert torch.equal(laid_out[: x.scale.shape[1], : x.scale.shape[0]], x.scale.t())
    assert bool((laid_out[x.scale.shape[1] :] == 1).all())


def test_rule_6_codes_are_not_padded_where_the_hardware_needs_none():
    codes = probe("row", shape=(3, 5)).codes
    assert scaled_mm._pad(codes, 128, 128) is codes


# --- on a GPU -------------------------------------------------------------------------------------------------------

HOPPER = 33 * 2.0**-13  # of the sum of magnitudes: what its accumulation may lose at worst (kernels/test_gemm.py)


def random_codes(rows: int, cols: int, granularity) -> Quantized:
    """Codes and scales drawn apart, so that a scale in the wrong place shows as a factor of up to 2^12."""
    scale = torch.exp2(torch.randint(-6, 7, granularity.scale_shape(rows, cols)).float())
    return Quantized(torch.randn(rows, cols).to(torch.float8_e4m3fn).cuda(), scale.cuda(), granularity)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("left", "right"), [(TILE_1x128, BLOCK_128x128), (BLOCK_128x128, TILE_1x128), (TILE_1x128, TILE_1x128)]
)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(128, 128, 128), (384, 256, 640), (130, 140, 300), (1, 129, 1), (257, 1, 513)], ids=str
)
def test_non_uniform_block_scales_reach_their_blocks(m, n, k, left, right, oracle):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("block scales are Hopper's")
    a, b = random_codes(m, k, left), random_codes(n, k, right)
    assert scaled_mm.unsupported_reason_block(a, b) is None
    exact, magnitude = oracle(a, b)
    y = scaled_mm.scaled_mm_block(a, b, torch.float32, False).cpu().double()
    assert y.shape == (m, n)
    assert bool(((y - exact).abs() <= HOPPER * magnitude).all())  # one wrong scale is off by a factor of two at least


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (17, 33, 130), (128, 256, 384), (5, 16, 15)], ids=str)
@pytest.mark.parametrize(
    ("left", "right"), [("row", "row"), ("row", "tensor"), ("tensor", "row"), ("tensor", "tensor")]
)
def test_row_and_tensor_scales_in_every_size(m, n, k, left, right, oracle):
    a, b = random_codes(m, k, granularity_named(left)), random_codes(n, k, granularity_named(right))
    exact, magnitude = oracle(a, b)
    kernel = scaled_mm.scaled_mm_tensor if (left, right) == ("tensor", "tensor") else scaled_mm.scaled_mm_row
    y = kernel(a, b, torch.float32, False).cpu().double()
    assert y.shape == (m, n)
    assert bool(((y - exact).abs() <= HOPPER * magnitude + 2.0**-8 * exact.abs()).all())  # row scales: in BF16


@pytest.mark.gpu
def test_e5m2_with_row_scales_is_refused_on_a_gpu():
    a = kernels.quantize(torch.randn(32, 32, device="cuda"), "e5m2", "row")
    assert scaled_mm.unsupported_reason_row(a, a) == "row scales take E4M3 operands only"


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128"])
def test_scales_that_start_between_two_addresses_of_cublas(granularity):
    """Part of a batch of operands: its scales lie at a multiple of four bytes, cuBLAS wants sixteen."""
    a, b = probe(granularity, shape=(128, 384)), probe(granularity, shape=(256, 384))
    want = kernels.gemm(a, b, torch.float32 if granularity != "row" else torch.bfloat16)
    shifted = [moved(x, 1) for x in (a, b)]
    got = kernels.gemm(*shifted, want.dtype)
    assert apart(got, want) < (1e-2 if granularity == "row" else 1e-3)


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the norm of the difference over the norm; Hopper sums the products with 13 bits."""
    return float((got.cpu().float() - want.float()).norm() / want.float().norm())


def moved(x: Quantized, by: int) -> Quantized:
    """Return the matrix on the GPU with its scales `by` elements into a buffer, laid out as before."""
    buffer = torch.zeros(x.scale.numel() + by, device="cuda")
    flat = x.scale.t().contiguous() if x.granularity == TILE_1x128 else x.scale.contiguous()
    buffer[by:] = flat.reshape(-1).cuda()
    scale = buffer[by:].view(flat.shape)
    return Quantized(x.codes.cuda(), scale.t() if x.granularity == TILE_1x128 else scale, x.granularity)


@pytest.mark.gpu
def test_block_scales_of_a_single_column_say_their_strides():
    a = kernels.quantize(torch.randn(256, 100), "e4m3", "1x128")
    one = Quantized(a.codes.cuda(), torch.as_strided(a.scale.cuda(), (256, 1), (1, 1)), a.granularity)
    got = kernels.gemm(one, one, torch.float32)
    assert apart(got, kernels.gemm(a, a, torch.float32)) < 1e-3


@pytest.mark.parametrize("shape", [(3, 40), (3, 48), (16, 40), (16, 48)], ids=str)
def test_a_product_without_its_padding_is_no_view_to_autograd(shape):
    y = scaled_mm._cropped(torch.randn(16, 48), *shape)
    assert y.shape == shape and not y._is_view()
