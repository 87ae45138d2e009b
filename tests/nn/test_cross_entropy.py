from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo import kernels
from octavo.errors import ConfigError
from octavo.nn import cross_entropy as module
from octavo.nn.cross_entropy import chunk_of, linear_cross_entropy
from octavo.numerics import sqnr_db
from octavo.recipes import load
from octavo.tensor import FP8Tensor

M, K, V = 37, 48, 80
MIXED = {"base": "folded", "dgrad": {"precision": "bf16"}}
STOCHASTIC = {
    "base": "rowwise",
    "dgrad": {"grad_output": {"rounding": "stochastic"}},
    "wgrad": {"grad_output": {"rounding": "stochastic"}},
}


def operands(dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    x, weight = torch.randn(M, K, dtype=dtype), torch.randn(V, K, dtype=dtype) / 4
    targets = torch.randint(V, (M,))
    targets[[3, 20]] = -100
    leaves = [t.requires_grad_() for t in (x, weight, torch.randn(V, dtype=dtype))]
    return leaves[0], leaves[1], leaves[2] if bias else None, targets


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, **options: object) -> list[Tensor]:
    """Loss and gradients in float64 by PyTorch's own functions."""
    softcap, z_loss = options.pop("softcap", 0.0), options.pop("z_loss", 0.0)
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    logits = F.linear(*leaves)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    loss = F.cross_entropy(logits, targets, **options)
    counted = targets != options.get("ignore_index", -100)
    penalty = z_loss * (logits.logsumexp(-1).square() * counted).sum()
    loss = loss + (penalty if options.get("reduction") == "sum" else penalty / counted.sum())
    return [loss, *torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])]


def fused(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, **options: object) -> list[Tensor]:
    loss = linear_cross_entropy(x, weight, targets, bias=bias, **options)
    return [loss, *torch.autograd.grad(loss, [leaf for leaf in (x, weight, bias) if leaf is not None])]


def assert_close(got: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * b.abs().max().item())


def test_the_gradient_of_a_bias_is_summed_in_fp32_over_tokens_and_chunks() -> None:
    tokens = 600
    x, weight = torch.randn(tokens, K).bfloat16(), torch.randn(V, K).bfloat16() / 4
    targets, bias = torch.randint(8, (tokens,)), torch.randn(V).bfloat16()  # most columns have gradients of one sign

    def gradient(dtype: torch.dtype, chunk: int) -> Tensor:
        leaf = bias.to(dtype, copy=True).requires_grad_()
        linear_cross_entropy(x, weight, targets, bias=leaf, reduction="sum", chunk=chunk).backward()
        assert leaf.grad is not None
        return leaf.grad

    by_token = gradient(torch.float32, 1)  # the sum of one row in BF16 is that row
    for chunk in (8, 250, tokens):
        torch.testing.assert_close(gradient(torch.float32, chunk), by_token, rtol=2e-6, atol=1e-4)
        assert torch.equal(gradient(torch.bfloat16, chunk), gradient(torch.float32, chunk).bfloat16())
    _, db = exact(x, weight, bias.requires_grad_(), targets, reduction="sum")[::3]
    torch.testing.assert_close(by_token.double(), db, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("chunk", [None, 1, 10, 36, 37, 1000])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_equals_float64_whatever_the_chunk(chunk: int | None, reduction: str) -> None:
    args = operands()
    got = fused(*args, chunk=chunk, reduction=reduction)
    assert got[0].dtype == torch.float32 and got[0].shape == ()
    assert_close(got, exact(*args, reduction=reduction))


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"z_loss": 0.1}, {"softcap": 2.0, "z_loss": 0.05}])
def test_soft_cap_and_z_loss(options: dict[str, float]) -> None:
    args = operands()
    assert_close(fused(*args, chunk=16, **options), exact(*args, **options))


def test_without_bias_and_with_leading_dimensions() -> None:
    x, weight, _, targets = operands(bias=False)
    loss = linear_cross_entropy(x[:36].view(3, 12, K), weight, targets[:36].view(3, 12), chunk=5)
    dx, dw = torch.autograd.grad(loss, [x, weight])
    expected = exact(x[:36], weight, None, targets[:36])
    assert_close([loss, dx[:36], dw], expected)
    assert (dx[36] == 0).all()


def test_another_ignore_index() -> None:
    x, weight, bias, targets = operands()
    targets[targets < 0] = 5
    assert_close(fused(x, weight, bias, targets, ignore_index=5), exact(x, weight, bias, targets, ignore_index=5))


def test_when_nothing_counts_it_does_as_pytorch_does() -> None:
    x, weight, bias, targets = operands()
    targets.fill_(-100)
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    theirs = F.cross_entropy(F.linear(*leaves), targets)
    expected = [theirs, *torch.autograd.grad(theirs, leaves)]
    got = fused(x, weight, bias, targets)
    assert got[0].isnan() and expected[0].isnan()
    for a, b in zip(got[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b)
    assert fused(x, weight, bias, targets, reduction="sum")[0] == 0


def test_no_tokens_at_all() -> None:
    x, weight = torch.randn(0, K, requires_grad=True), torch.randn(V, K, requires_grad=True)
    loss, dx, dw = fused(x, weight, None, torch.zeros(0, dtype=torch.int64), reduction="sum")
    assert loss == 0 and dx.shape == (0, K) and torch.equal(dw, torch.zeros(V, K))


@pytest.mark.parametrize("target", [-1, V, V + 1000])
def test_a_target_outside_the_vocabulary_is_an_error(target: int) -> None:
    x, weight, bias, targets = operands()
    targets[30] = target
    with pytest.raises(ConfigError, match=rf"target {target} .* vocabulary of {V}"):
        linear_cross_entropy(x, weight, targets, bias=bias, chunk=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(M, K + 1)}, "takes x"),
        ({"targets": torch.zeros(M + 1, dtype=torch.int64)}, "takes x"),
        ({"targets": torch.zeros(M, dtype=torch.int32)}, "int64"),
        ({"bias": torch.zeros(V + 1)}, "bias has shape"),
        ({"reduction": "none"}, "unknown reduction 'none'"),
        ({"chunk": 0}, "chunk 0"),
        ({"softcap": -1.0}, "softcap"),
        ({"recipe": "foldedd"}, "Did you mean 'folded'"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    x, weight, _, targets = operands()
    arguments = {"x": x, "weight_VK": weight, "targets": targets, **change}
    with pytest.raises(ConfigError, match=message):
        linear_cross_entropy(**arguments)


def test_only_what_requires_a_gradient_gets_one() -> None:
    x, weight, bias, targets = operands()
    expected = exact(x, weight, bias, targets)
    for index, leaf in enumerate((x, weight, bias)):
        for other in (x, weight, bias):
            other.requires_grad_(other is leaf)
            other.grad = None
        linear_cross_entropy(x, weight, targets, bias=bias, chunk=10).backward()
        assert_close([leaf.grad], [expected[1 + index]])
        assert all(other.grad is None for other in (x, weight, bias) if other is not leaf)


def test_an_evaluation_makes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    args = operands()
    seen = []
    real = module.cross_entropy_
    monkeypatch.setattr(module, "cross_entropy_", lambda *a, **k: seen.append(k["gradient"]) or real(*a, **k))
    with torch.no_grad():
        loss = linear_cross_entropy(*args[:2], args[3], bias=args[2], chunk=10)
    assert seen == [False] * 4 and not loss.requires_grad
    assert_close([loss], exact(*args)[:1])


def test_no_more_than_a_chunk_of_logits_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    args = operands()
    shapes = []
    real = module.cross_entropy_
    monkeypatch.setattr(module, "cross_entropy_", lambda d, *a, **k: shapes.append(tuple(d.shape)) or real(d, *a, **k))
    fused(*args, chunk=16)
    assert shapes == [(16, V), (16, V), (5, V)]


def test_gradients_accumulate_and_scale_with_the_incoming_one() -> None:
    x, weight, bias, targets = operands()
    for part in (slice(0, 20), slice(20, M)):
        (linear_cross_entropy(x[part], weight, targets[part], bias=bias, reduction="sum", chunk=7) / 8).backward()
    expected = exact(x, weight, bias, targets, reduction="sum")
    assert_close([x.grad, weight.grad, bias.grad], [gradient / 8 for gradient in expected[1:]])


def test_backward_may_run_again_where_the_graph_is_kept() -> None:
    x, weight, bias, targets = operands()
    loss = linear_cross_entropy(x, weight, targets, bias=bias)
    (3 * loss).backward(retain_graph=True)
    first = [t.grad.clone() for t in (x, weight, bias)]
    x.grad = weight.grad = bias.grad = None
    loss.backward()
    for once, thrice in zip((x, weight, bias), first, strict=True):
        torch.testing.assert_close(3 * once.grad, thrice)


def test_a_gradient_is_scaled_in_its_own_memory_where_the_graph_is_not_kept() -> None:
    x, weight, _, targets = operands()
    loss = linear_cross_entropy(x, weight, targets)
    function = next(f for f in walk(loss.grad_fn) if type(f).__name__ == "_LinearCrossEntropyBackward")
    made = [t.data_ptr() for t in function.saved_tensors[:2]]
    del function
    loss.backward()
    assert [x.grad.data_ptr(), weight.grad.data_ptr()] == made


def walk(node: object) -> list[object]:
    """Every function of an autograd graph."""
    return [node, *(f for after, _ in node.next_functions if after is not None for f in walk(after))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_computes_in_bf16_and_returns_each_gradient_in_its_own_dtype(dtype: torch.dtype) -> None:
    x, weight, bias, targets = operands()
    x = x.detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = fused(x, weight, bias, targets, chunk=16)
        theirs = F.cross_entropy(F.linear(x, weight, bias).float(), targets)
    theirs = [theirs, *torch.autograd.grad(theirs, (x, weight, bias))]
    assert [t.dtype for t in got] == [torch.float32, dtype, torch.float32, torch.float32]
    expected = exact(x, weight, bias, targets)
    torch.testing.assert_close(got[0].double(), expected[0], rtol=1e-3, atol=0)
    for ours, them, truth in zip(got[1:], theirs[1:], expected[1:], strict=True):
        assert sqnr_db(truth, ours) > min(sqnr_db(truth, them) - 2, 45)


@pytest.mark.parametrize("recipe", ["bf16", "folded"])
def test_the_weights_gradient_is_summed_over_chunks_in_fp32(recipe: str) -> None:
    """In BF16 the sum over 256 chunks would lose 7 dB or more."""
    x = torch.randn(1024, K)
    weight, targets = (torch.randn(V, K) / 4).requires_grad_(), torch.randint(V, (1024,))
    found = {}
    for chunk in (4, 1024):
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy(x, weight, targets, recipe=recipe, chunk=chunk)
        found[chunk] = torch.autograd.grad(loss, weight)[0]
    truth = exact(x, weight, None, targets)[2]
    assert sqnr_db(truth, found[4]) > sqnr_db(truth, found[1024]) - 0.7


@pytest.mark.parametrize("chunks", [2, 3])
def test_the_sum_over_chunks_is_rounded_once(chunks: int) -> None:
    """Also for two chunks, which are added in BF16."""
    x, weight = torch.randn(chunks * 32, K).bfloat16(), (torch.randn(V, K) / 4).bfloat16().requires_grad_()
    targets = torch.randint(V, (len(x),))

    def wgrad(rows: slice) -> Tensor:
        loss = linear_cross_entropy(x[rows], weight, targets[rows], recipe="folded", reduction="sum", chunk=32)
        return torch.autograd.grad(loss, weight)[0]

    parts = torch.stack([wgrad(slice(start, start + 32)) for start in range(0, len(x), 32)])
    assert torch.equal(wgrad(slice(None)), parts.float().sum(0).bfloat16())


def test_fp16_gradients_do_not_underflow() -> None:
    x, weight, _, targets = operands(torch.float16, bias=False)
    x = x.detach().repeat(20, 1).requires_grad_()
    targets = targets.repeat(20)
    scale = 2.0**14
    loss = linear_cross_entropy(x, weight, targets) * scale
    dx, _ = torch.autograd.grad(loss, (x, weight))
    assert sqnr_db(exact(x, weight, None, targets)[1] * scale, dx) > 50


FLOORS = {"folded": 28, "rotated": 28, "rowwise": 28, "tensorwise": 27, "block": 28}


@pytest.mark.parametrize("recipe", [*FLOORS, "bf16"])
def test_fp8_recipes_stay_above_their_floors(recipe: str) -> None:
    tokens, width, vocab = 300, 256, 384
    x = (torch.randn(tokens, width) * torch.exp(torch.randn(tokens, 1) / 2)).requires_grad_()
    weight = (torch.randn(vocab, width) / 32).requires_grad_()
    targets = torch.randint(vocab, (tokens,))
    with torch.autocast("cpu", torch.bfloat16), kernels.record() as ledger:
        got = fused(x, weight, None, targets, recipe=recipe, chunk=128)
    expected = exact(x, weight, None, targets)
    assert abs(got[0] / expected[0] - 1) < 1e-3
    assert sum(ledger.gemms.values()) == (0 if recipe == "bf16" else 9)
    for ours, truth in zip(got[1:], expected[1:], strict=True):
        assert sqnr_db(truth, ours) > FLOORS.get(recipe, 45)


def test_the_folded_head_equals_its_float64_oracle(oracle: object) -> None:
    """The three GEMMs by an oracle that quantises by itself; the softmax between them in float64."""
    x, weight, _, targets = operands(bias=False)
    targets[targets < 0] = 0
    recipe = load("folded")
    logits, _ = oracle(x, weight, torch.zeros(M, V), recipe)[0]
    d = (logits.softmax(-1) - F.one_hot(targets, V)).float()
    _, (dx, _), (dw, _) = oracle(x, weight, d, recipe)
    got = fused(x, weight, None, targets, recipe="folded", reduction="sum")
    torch.testing.assert_close(got[0].double(), F.cross_entropy(logits, targets, reduction="sum"), rtol=1e-5, atol=1e-5)
    assert sqnr_db(dx, got[1]) > 45 and sqnr_db(dw, got[2]) > 45  # a code may be one apart


@pytest.mark.parametrize("recipe", [MIXED, STOCHASTIC, {"base": "folded", "fprop": {"accumulate": "fast"}}])
def test_any_recipe_is_computed_as_it_says(recipe: dict[str, object]) -> None:
    args = operands()
    got, expected = fused(*args, recipe=recipe, chunk=16), exact(*args)
    assert abs(got[0] / expected[0] - 1) < 1e-2
    for ours, truth in zip(got[1:], expected[1:], strict=True):
        assert sqnr_db(truth, ours) > 18


def test_a_recipe_that_keeps_scales_is_refused() -> None:
    x, weight, _, targets = operands()
    for recipe in ("delayed", load("just_in_time")):
        with pytest.raises(
            ConfigError, match="keeps scales from step to step, and a loss has no layer to keep them in"
        ):
            linear_cross_entropy(x, weight, targets, recipe=recipe)


@pytest.mark.covering(1)
@pytest.mark.parametrize("recipe", ["bf16", "folded", load(MIXED)])
@pytest.mark.parametrize("autocast", [False, True])
def test_it_compiles_as_one_graph(recipe: object, autocast: bool) -> None:
    torch._dynamo.reset()
    args = operands()

    def run(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return linear_cross_entropy(2 * x, weight, targets, bias=bias, recipe=recipe, chunk=16)

    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        loss = function(*args)
        results.append([loss, *torch.autograd.grad(loss, args[:3])])
        with torch.no_grad():
            torch.testing.assert_close(function(*args), loss)
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("recipe", ["folded", "bf16"])
def test_a_weight_in_fp8_is_read_as_it_is(recipe: str, compiles: bool) -> None:
    torch._dynamo.reset()
    x, weight, bias, targets = operands()
    stored = nn.Parameter(FP8Tensor.from_tensor(weight))
    plain = weight if recipe == "folded" else stored.dequantize().detach().requires_grad_()

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets, bias=bias, recipe=recipe, chunk=16)

    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compiles else run
    results = []
    for leaf in (plain, stored):
        loss = function(x, leaf, bias, targets)
        results.append([loss, *torch.autograd.grad(loss, [x, leaf, bias])])
    for got, expected in zip(*results, strict=True):
        assert not isinstance(got, FP8Tensor) and torch.equal(got, expected)


@pytest.mark.slow
def test_it_compiles_with_inductor() -> None:
    torch._dynamo.reset()
    args = operands()
    compiled = torch.compile(lambda x, w, b, t: linear_cross_entropy(x, w, t, bias=b, chunk=16), fullgraph=True)
    loss = compiled(*args)
    assert_close([loss, *torch.autograd.grad(loss, args[:3])], exact(*args))


def test_the_operator_is_what_its_schema_says() -> None:
    x, weight, bias, targets = (t.detach() for t in operands())
    for needs in ([True, True, True], [False, True, False], [False, False, False]):
        operation, options = (
            module._linear_cross_entropy,
            (load("bf16").plan.key, torch.bfloat16, -100, 0.0, 0.0, 16, needs),
        )
        torch.library.opcheck(
            operation.operator,
            operation.encode(x, weight, bias, targets, options),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize(
    ("vocab", "dtype", "device", "tokens"),
    [
        (272, torch.bfloat16, "cpu", 120 * 1024),
        (50257, torch.bfloat16, "cpu", 640),
        (50257, torch.float32, "cpu", 256),
        (128256, torch.bfloat16, "cuda", 4096),
        (256000, torch.bfloat16, "cuda", 2048),
        (10**9, torch.bfloat16, "cuda", 128),
        (128256, torch.bfloat16, "xpu", 256),
    ],
)
def test_the_size_of_a_chunk(vocab: int, dtype: torch.dtype, device: str, tokens: int) -> None:
    assert chunk_of(vocab, dtype, device) == tokens


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "folded", "block", "tensorwise"])
def test_on_a_gpu(recipe: str) -> None:
    tokens, width, vocab = 1000, 512, 32000
    x, weight = torch.randn(tokens, width, device="cuda"), torch.randn(vocab, width, device="cuda") / 32
    x, weight = x.requires_grad_(), weight.requires_grad_()
    targets = torch.randint(vocab, (tokens,), device="cuda")
    targets[:10] = -100
    with torch.autocast("cuda", torch.bfloat16), kernels.record() as ledger:
        linear_cross_entropy(x, weight, targets, recipe=recipe, chunk=384)  # quantises the weight
        torch.cuda.set_sync_debug_mode("error")  # from here on the host may not wait
        try:
            loss = linear_cross_entropy(x, weight, targets, recipe=recipe, chunk=384)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not ledger.fallbacks
    got = [loss, *torch.autograd.grad(loss, (x, weight))]
    expected = exact(x, weight, None, targets)
    assert abs(got[0] / expected[0] - 1) < 1e-3
    for ours, truth in zip(got[1:], expected[1:], strict=True):
        assert sqnr_db(truth, ours) > FLOORS.get(recipe, 45)


@pytest.mark.gpu
def test_the_memory_of_two_chunks_in_fp8() -> None:
    """Peak: dW twice, and the codes of weight and gradient, each in two layouts."""
    width = chunk = 1024
    x = torch.randn(2 * chunk, width, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(65536, width, device="cuda") / 32).bfloat16().requires_grad_()
    targets = torch.randint(len(weight), (len(x),), device="cuda")
    for _ in range(2):  # the first loads kernels and workspaces
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        linear_cross_entropy(x, weight, targets, recipe="folded", chunk=chunk)
        peak = torch.cuda.max_memory_allocated() - before
    assert 3.9 < peak / weight.nbytes < 4.3


@pytest.mark.gpu
def test_on_a_gpu_a_target_outside_the_vocabulary_gives_nan() -> None:
    x, weight = torch.randn(8, 64, device="cuda"), torch.randn(96, 64, device="cuda")
    targets = torch.tensor([1, 2, 3, 96, 5, 6, 7, 8], device="cuda")
    assert linear_cross_entropy(x, weight, targets).isnan()
