"""The linear layer's three GEMMs: against float64 (conftest.py), how accurate, and what they keep for backward."""

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.errors import UnsupportedError
from octavo.nn.functional import Quantizer, linear, linears, read_weights, save_weights
from octavo.numerics import dequantize, sqnr_db, sqnr_per_row_db
from octavo.recipes import Recipe, load

UNIT = 2.0**-24
PRESETS = ["folded", "rowwise", "tensorwise", "block", "bf16"]
FP8_PRESETS = PRESETS[:-1]


def operands(gemm_operands: dict[str, tuple[str, str]], **settings) -> dict:
    return {gemm: dict.fromkeys(roles, settings) for gemm, roles in gemm_operands.items()}


ROLES = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
E5M2 = {"grad_output": {"format": "e5m2"}}
RECIPES: dict[str, Recipe] = {name: load(name) for name in PRESETS} | {
    "folded, wgrad bf16": load({"wgrad": {"precision": "bf16"}}),
    "folded, dgrad bf16": load({"dgrad": {"precision": "bf16"}}),
    "folded, FP32 scales": load(operands(ROLES, scaling="float32")),
    "folded, E5M2 gradients": load({"dgrad": E5M2, "wgrad": E5M2}),
    "folded, one scale a gradient": load({g: {"grad_output": {"granularity": "tensor"}} for g in ("dgrad", "wgrad")}),
    "rowwise, fprop bf16": load({"base": "rowwise", "fprop": {"precision": "bf16"}}),
    "rowwise, FP32 scales": load({"base": "rowwise", **operands(ROLES, scaling="float32")}),
    "tensorwise, only wgrad": load(
        {"base": "tensorwise", "fprop": {"precision": "bf16"}, "dgrad": {"precision": "bf16"}}
    ),
    "only dgrad folded": load({"wgrad": {"input": {"granularity": "row"}}}),
    "only wgrad folded": load({"dgrad": {"weight": {"granularity": "row"}}}),
    "block, FP32 scales": load({"base": "block", **operands(ROLES, scaling="float32")}),
    "1x32": load({"base": "rowwise", **operands(ROLES, granularity="1x32")}),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
every_fp8_preset = pytest.mark.parametrize("name", FP8_PRESETS)


def run(x: Tensor, w: Tensor, dy: Tensor, recipe: Recipe | str) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, dx, dw."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = linear(x, w, None, load(recipe))
    y.backward(dy)
    assert x.grad is not None and w.grad is not None
    return y.detach(), x.grad, w.grad


def normal(m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(m, k), torch.randn(n, k) * 0.02, torch.randn(m, n)


def with_outliers(m: int, n: int, k: int, alignment: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and channels with lognormal magnitudes of their own: tokens over five decades, channels over two.

    alignment: -1 where the gradient is small for large tokens (after a norm), 0 where it is the same for all, 1 where
        it is large for them.
    """
    token, channel, feature = (
        torch.exp(2 * torch.randn(m, 1)),
        torch.exp(torch.randn(1, k)),
        torch.exp(torch.randn(1, n)),
    )
    return torch.randn(m, k) * token * channel, torch.randn(n, k) * 0.02, torch.randn(m, n) * feature * token**alignment


def exact(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, w, dy = x.double(), w.double(), dy.double()
    return x @ w.t(), dy @ w, dy.t() @ x


# --- the three GEMMs against float64 --------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n", "k"), [(48, 64, 32), (33, 47, 130), (1, 1, 1), (200, 150, 260)], ids=str)
@every_recipe
def test_three_gemms_are_float64s_up_to_fp32_sums(recipe, m, n, k, oracle):
    # The bound of kernels/test_gemm.py: adding L terms in FP32, in any order, and a few roundings of scales.
    x, w, dy = with_outliers(m, n, k)
    results = run(x, w, dy, recipe)
    for result, (expected, magnitude), length in zip(results, oracle(x, w, dy, recipe), (k, n, m), strict=True):
        assert result.dtype == torch.float32
        assert bool(((result - expected).abs() <= (length + 3) * UNIT * magnitude).all())


def test_folding_is_exact_with_power_of_two_scales():
    # Gradients of a few bits lose nothing when they are quantised, weight scales and token scales inside or not. Then
    # dx must be dy . (W's values) and dw dy^T . (X's values): moving the scales has changed nothing, in any bit of a
    # product.
    x, w, _ = with_outliers(40, 24, 56)
    token = torch.exp2(torch.randint(-3, 4, (40, 1)).float())
    x = x / x.abs().amax(dim=1, keepdim=True) * 448 * token  # scales 2^-3 to 2^3, so that H stays in E4M3's range
    dy = torch.randint(-3, 4, (40, 24)).float()
    recipe = load("folded")
    _, dx, dw = run(x, w, dy, recipe)
    w_values = dequantize(kernels.quantize(w, "e4m3", "row")).double()
    x_values = dequantize(kernels.quantize(x, "e4m3", "row")).double()
    for result, a, b in ((dx, dy.double(), w_values.t()), (dw, dy.double().t(), x_values.t())):
        bound = (a.shape[1] + 3) * UNIT * (a.abs() @ b.t().abs())
        assert bool(((result - a @ b.t()).abs() <= bound).all())


# --- how accurate ---------------------------------------------------------------------------------------------------


@every_fp8_preset
def test_accuracy_on_normal_data(name):
    # E4M3's 3 fraction bits leave an operand at 31.5 dB, a product of two at 28.5; E5M2 gradients cost 4 dB more. A
    # single row averages fewer errors, so that the worst of 256 lies some 2 dB lower.
    data = normal(256, 192, 320)
    gradients = 24.0 if name == "tensorwise" else 27.0
    for result, reference, least in zip(run(*data, name), exact(*data), (27.0, gradients, gradients), strict=True):
        assert sqnr_db(reference, result) >= least
        assert float(sqnr_per_row_db(reference, result).min()) >= least - 2.5


@pytest.mark.parametrize("alignment", [-1, 0, 1])
def test_folded_is_as_accurate_as_rowwise_on_outliers(alignment):
    # Power-of-two scales move E4M3's window without touching a digit, so that the two differ only by what flushes
    # below it: in dw, where tokens of all sizes meet, folding the token's scale into the gradient even narrows the
    # range (-1).
    for seed in range(3):
        torch.manual_seed(seed)
        data = with_outliers(256, 192, 320, alignment)
        for one, other, reference in zip(run(*data, "folded"), run(*data, "rowwise"), exact(*data), strict=True):
            assert sqnr_db(reference, one) >= sqnr_db(reference, other) - 1.0
            assert sqnr_db(reference, one) >= 27.0


def test_outliers_ruin_rows_under_one_scale_a_tensor_and_not_under_folded():
    # What the outlier data are for: small tokens flush under the scale of large ones. Without this the test above
    # says little.
    data = with_outliers(256, 192, 320)
    worst = {
        name: float(sqnr_per_row_db(exact(*data)[0], run(*data, name)[0]).min()) for name in ("folded", "tensorwise")
    }
    assert worst["tensorwise"] < 15.0
    assert worst["folded"] > 23.0


@every_fp8_preset
def test_scaling_everything_by_a_power_of_two_changes_no_digit(name):
    # Rule 2 for a whole layer: gradients of 2^-60 train as gradients of 1 do.
    x, w, dy = normal(32, 48, 64)
    plain, scaled = run(x, w, dy, name), run(x * 2.0**10, w, dy * 2.0**-60, name)
    for one, other, power in zip(plain, scaled, (10, -60, -50), strict=True):
        assert torch.equal(one * 2.0**power, other)


@every_fp8_preset
def test_rule_3_a_nan_token_ruins_its_own_row_and_no_other(name):
    x, w, dy = normal(16, 32, 48)
    x[3, 5] = torch.nan
    y, dx, dw = run(x, w, dy, name)
    assert y.isnan().any(dim=1).nonzero().flatten().tolist() == [3]
    assert bool(y[3].isnan().all())
    assert not dx.isnan().any()
    assert dw.isnan().any(dim=0).nonzero().flatten().tolist() == [5]


@every_fp8_preset
def test_rule_3_an_infinite_gradient_is_seen_in_dx_and_dw(name):
    x, w, dy = normal(16, 32, 48)
    dy[3, 7] = torch.inf
    _, dx, dw = run(x, w, dy, name)
    assert (~dx.isfinite()).any(dim=1).nonzero().flatten().tolist() == [3]
    assert (~dw.isfinite()).any(dim=1).nonzero().flatten().tolist() == [7]


def test_stochastic_rounding_averages_out_over_steps():
    # Unbiased means that the mean gradient of many steps nears the exact one: the noise falls as 1 / sqrt(steps).
    # Were the same random bits drawn at every step, it would not fall at all.
    recipe = load({"base": "rowwise", "wgrad": {"grad_output": {"rounding": "stochastic"}}})
    dy = torch.randn(64, 32)
    x = torch.eye(64, 48)  # exact in FP8, and dw picks single gradients
    w = torch.randn(32, 48)
    reference = exact(x, w, dy)[2]
    first = run(x, w, dy, recipe)[2]
    mean = torch.stack([run(x, w, dy, recipe)[2] for _ in range(64)]).mean(dim=0)
    assert sqnr_db(reference, mean) > sqnr_db(reference, first) + 12  # 10 log10(64) = 18 dB, less chance


@pytest.mark.parametrize("gemms", [("dgrad",), ("wgrad",), ("dgrad", "wgrad")], ids=str)
def test_stochastic_gradients_are_folded_too(gemms):
    # Tokens and features differ by orders of magnitude, and so do the scales that move into the gradient.
    recipe = load({gemm: {"grad_output": {"rounding": "stochastic"}} for gemm in gemms})
    data = with_outliers(256, 192, 320, alignment=0)
    for result, reference in zip(run(*data, recipe)[1:], exact(*data)[1:], strict=True):
        assert sqnr_db(reference, result) >= 24.0  # 3 dB below rounding to nearest


def test_stochastic_rounding_compiles_and_draws_anew_every_time():
    recipe = load({"base": "rowwise", "wgrad": {"grad_output": {"rounding": "stochastic"}}})
    x, w, dy = normal(24, 16, 40)
    w.requires_grad_()
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    first, second = (torch.autograd.grad(compiled(x, w, None, recipe), w, dy)[0] for _ in range(2))
    assert not torch.equal(first, second)
    torch._dynamo.reset()


# --- shapes, bias, dtypes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (1, 2, 3, 7), (0, 7), (2, 0, 7)], ids=str)
@pytest.mark.parametrize("name", PRESETS)
def test_any_leading_shape(name, shape):
    x, w, bias = (
        torch.randn(shape, requires_grad=True),
        torch.randn(5, 7, requires_grad=True),
        torch.randn(5, requires_grad=True),
    )
    y = linear(x, w, bias, load(name))
    assert y.shape == (*shape[:-1], 5)
    flat = linear(x.reshape(-1, 7), w, bias, load(name))
    assert torch.equal(y.reshape(-1, 5), flat)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert w.grad is not None and w.grad.shape == w.shape
    if x.numel() == 0:
        assert not w.grad.any()


@pytest.mark.parametrize("name", PRESETS)
def test_non_contiguous_input_and_gradient(name):
    x, w, dy = normal(24, 16, 40)
    expected = run(x, w, dy, name)
    strided = run(x.t().contiguous().t(), w.t().contiguous().t(), dy.t().contiguous().t(), name)
    assert all(torch.equal(one, other) for one, other in zip(expected, strided, strict=True))
    broadcast = run(x, w, torch.ones(1, 1).expand(24, 16), name)  # the gradient of a sum has strides of 0
    assert all(torch.equal(a, b) for a, b in zip(broadcast, run(x, w, torch.ones(24, 16), name), strict=True))


@pytest.mark.parametrize("name", PRESETS)
def test_bias_is_added_after_and_has_its_plain_gradient(name):
    x, w, dy = normal(24, 16, 40)
    bias = torch.randn(16, requires_grad=True)
    y = linear(x, w, bias, load(name))
    assert torch.equal(y, linear(x, w, None, load(name)) + bias)
    y.backward(dy)
    torch.testing.assert_close(bias.grad, dy.sum(dim=0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", PRESETS)
def test_results_have_the_dtype_of_their_inputs(name, dtype):
    x = torch.randn(24, 40, dtype=dtype, requires_grad=True)
    w = torch.randn(16, 40, requires_grad=True)  # an FP32 master
    bias = torch.randn(16, requires_grad=True)
    y = linear(x, w, bias, load(name))
    assert y.dtype == dtype
    y.sum().backward()
    assert (x.grad.dtype, w.grad.dtype, bias.grad.dtype) == (dtype, torch.float32, torch.float32)


# --- backward does what is needed -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x_grad", "w_grad", "expected"), [(True, True, 3), (True, False, 2), (False, True, 2), (False, False, 1)]
)
@every_fp8_preset
def test_only_the_needed_gemms_run(name, x_grad, w_grad, expected):
    x, w, dy = normal(24, 16, 40)
    x.requires_grad_(x_grad)
    w.requires_grad_(w_grad)
    with kernels.record() as ledger:
        y = linear(x, w, None, load(name))
        if y.requires_grad:
            y.backward(dy)
    assert sum(ledger.gemms.values()) == expected
    assert (x.grad is not None, w.grad is not None) == (x_grad, w_grad)


def test_rule_5_each_gemm_accumulates_as_the_recipe_says_and_wgrad_slowly(monkeypatch):
    modes = []
    original = kernels.gemm
    monkeypatch.setattr(kernels, "gemm", lambda a, b, dtype, mode: modes.append(mode) or original(a, b, dtype, mode))
    run(*normal(24, 16, 40), "folded")
    run(*normal(24, 16, 40), load({"fprop": {"accumulate": "fast"}, "dgrad": {"accumulate": "fast"}}))
    assert modes == ["slow", "slow", "slow", "fast", "fast", "slow"]


@pytest.mark.parametrize(("x_grad", "w_grad"), [(True, False), (False, True)])
@every_recipe
def test_a_gradient_does_not_depend_on_whether_the_other_is_asked_for(recipe, x_grad, w_grad):
    x, w, dy = normal(24, 16, 40)
    _, dx, dw = run(x, w, dy, recipe)
    x.requires_grad_(x_grad)
    w.requires_grad_(w_grad)
    linear(x, w, None, recipe).backward(dy)
    assert torch.equal(x.grad, dx) if x_grad else torch.equal(w.grad, dw)


@pytest.mark.parametrize("name", PRESETS)
def test_backward_can_run_twice(name):
    x, w, dy = (t.requires_grad_(i < 2) for i, t in enumerate(normal(24, 16, 40)))
    y = linear(x, w, None, load(name))
    first = torch.autograd.grad(y, (x, w), dy, retain_graph=True)
    second = torch.autograd.grad(y, (x, w), dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_fp8_preset
def test_a_gradient_of_a_gradient_is_refused(name):
    # Quantising has no useful derivative: better an error than a wrong number.
    x, w, _ = normal(24, 16, 40)
    x.requires_grad_()
    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.autograd.grad(linear(x, w, None, load(name)).square().sum(), x, create_graph=True)


# --- what is kept ---------------------------------------------------------------------------------------------------

M, N, K = 48, 64, 160
FP8_X, FP32, MASTER = ("float8_e4m3fn", M * K), "float32", ("float32", N * K)
FP8_W = ("float8_e4m3fn", N * K)
KEPT = {  # the codes of the weight where dgrad reads them, else the weight itself, of which there is no copy
    "folded": [FP8_X, (FP32, M), FP8_W, (FP32, N)],
    "rowwise": [FP8_X, (FP32, K), MASTER],
    "tensorwise": [FP8_X, (FP32, 1), FP8_W, (FP32, 1)],
    "block": [FP8_X, (FP32, K * 1), FP8_W, (FP32, 1 * 2)],  # tiles of x^T (160, 48) and of w (64, 160)
    "bf16": [("bfloat16", M * K), MASTER],
    "folded, wgrad bf16": [("bfloat16", M * K), FP8_W, (FP32, N)],
    "folded, dgrad bf16": [FP8_X, (FP32, M), MASTER],
}


def kept_by(recipe: Recipe, x_grad: bool = True, w_grad: bool = True) -> list[Tensor]:
    kept: list[Tensor] = []
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=x_grad)
    w = torch.randn(N, K, requires_grad=w_grad)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(x, w, None, recipe)
    return kept


@pytest.mark.parametrize("name", KEPT)
def test_backward_keeps_only_this(name):
    kept = [(str(t.dtype).removeprefix("torch."), t.numel()) for t in kept_by(RECIPES[name])]
    assert kept == KEPT[name]


@pytest.mark.parametrize(("recipe", "keeps_codes"), [("folded", False), ("served", True), ("rowwise", False)])
def test_codes_of_a_bf16_weight_are_kept_where_they_do_not_follow_from_a_scale(recipe, keeps_codes):
    w = torch.randn(N, K, dtype=torch.bfloat16)
    saved = save_weights(read_weights([w], load(recipe).plan), [w], load(recipe).plan)
    assert (saved.codes is not None) == keeps_codes != (len(saved.weights) > 0)
    assert (saved.scale is not None) == load(recipe).reuses("dgrad.weight")
    assert load(recipe).plan.requantises_exactly == (recipe == "folded"), "the same rule for the input"


@every_fp8_preset
def test_one_byte_an_element_and_a_few_scales(name):
    kept = [t for t in kept_by(load(name)) if t.numel() != N * K]
    size = sum(t.numel() * t.element_size() for t in kept)
    assert M * K <= size <= M * K + 4 * (M + K)
    assert max(t.numel() for t in kept if t.dtype != torch.float8_e4m3fn) <= max(M, K), "a copy that is not FP8"


@every_fp8_preset
def test_nothing_is_kept_for_a_gemm_that_will_not_run(name):
    weight = KEPT[name][2:]
    assert [t.numel() for t in kept_by(load(name), w_grad=False)] == [count for _, count in weight]
    assert N * K not in [t.numel() for t in kept_by(load(name), x_grad=False)]
    assert kept_by(load(name), x_grad=False, w_grad=False) == []


# --- compiled, and on a GPU -----------------------------------------------------------------------------------------


COMPILED = (*PRESETS, "folded, wgrad bf16", "folded, one scale a gradient", "rowwise, fprop bf16", "1x32")
COMPILED += ("only dgrad folded", "only wgrad folded")
"""Every way through forward and backward; formats and scalings are constants of the graph."""


IN_EVERY_RUN = ("folded", "delayed", "block", "folded, wgrad bf16", "rowwise, fprop bf16", "only dgrad folded")
"""A case for each of: folded, kept and blocks' scales, a GEMM in BF16 in backward and in forward, half a fold."""


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(RECIPES[name], id=name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in COMPILED],
)
def test_compiled_is_bit_for_bit_eager(recipe):
    x, w, dy = normal(24, 16, 40)
    eager = run(x, w, dy, recipe)
    x, w = x.requires_grad_(), w.requires_grad_()
    y = torch.compile(linear, backend="aot_eager", fullgraph=True)(x, w, None, recipe)
    y.backward(dy)
    assert all(torch.equal(a, b) for a, b in zip((y, x.grad, w.grad), eager, strict=True))
    torch._dynamo.reset()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_evaluation_compiles_whatever_the_number_of_layers(count):
    x, weights = normal(24, 16, 40)[0], [normal(24, 16, 40)[1] for _ in range(count)]
    run, quantizer = torch.compile(linears, backend="aot_eager", fullgraph=True), Quantizer(load("delayed"), x.dtype)
    with torch.no_grad():
        expected = linears(x, weights, [None] * count, quantizer)
        outputs = run(x, weights, [None] * count, quantizer)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@every_fp8_preset
def test_accuracy_on_a_gpu(name, compiled):
    data = normal(256, 192, 320)
    x, w, dy = (t.cuda() for t in data)
    x.requires_grad_()
    w.requires_grad_()
    with kernels.record() as ledger:
        y = (torch.compile(linear, fullgraph=True) if compiled else linear)(x, w, None, load(name))
        y.backward(dy)
    gradients = 24.0 if name == "tensorwise" else 27.0
    for result, reference, least in zip((y, x.grad, w.grad), exact(*data), (27.0, gradients, gradients), strict=True):
        assert sqnr_db(reference, result.detach().cpu()) >= least
    assert sum(ledger.gemms.values()) == 3 and not ledger.fallbacks
    torch._dynamo.reset()
