"""`octavo.autocast`: white operators in FP8 by the recipe, all others bit for bit as without it."""

import ast
import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import kernels
from octavo.conversion import Operators
from octavo.errors import ConfigError
from octavo.nn import GroupedLinear, Linear
from octavo.numerics import sqnr_db

WHITE = {
    "linear": lambda a, b: F.linear(a[0], b[0]),
    "linear with bias": lambda a, b: F.linear(a, b[0], b[1].sum(1)),
    "@": lambda a, b: a @ b.mT,
    "Tensor.matmul": lambda a, b: a.matmul(b[0].t()),
    "mm": lambda a, b: torch.mm(a[0], b[0].t()),
    "mv": lambda a, b: torch.mv(b[0], a[0, 0]),
    "matmul, matrix and vector": lambda a, b: b[0] @ a[0, 0],
    "matmul, vector and matrix": lambda a, b: a[0, 0] @ b[0].t(),
    "bmm": lambda a, b: torch.bmm(a, b.mT),
    "addmm": lambda a, b: torch.addmm(b.sum((0, 2)), a[0], b[0].t(), beta=3, alpha=2),
    "addmm without input": lambda a, b: torch.addmm(
        torch.full((32,), torch.nan, dtype=a.dtype), a[0], b[0].t(), beta=0
    ),
    "baddbmm": lambda a, b: torch.baddbmm(b.sum(2)[:, None], a, b.mT, alpha=0.5),
    "einsum, a linear layer": lambda a, b: torch.einsum("bsd, fd -> bsf", a, b[0]),
    "einsum, attention": lambda a, b: torch.einsum("hqd,hkd->hqk", a, b),
    "einsum, all orders": lambda a, b: torch.einsum("hqd,khd->khq", a, b.transpose(0, 1)),
    "einsum, no arrow": lambda a, b: torch.einsum("qd,dk", [a[0], b[0].t()]),
    "einsum, two summed": lambda a, b: torch.einsum("hqd,hkd->qk", a, b),
    "conv1d": lambda a, b: F.conv1d(a.mT, nn.Parameter(b.detach().view(b.shape[1], 64, -1)), padding="same"),
    "conv2d": lambda a, b: F.conv2d(a.mT[..., None], nn.Parameter(b.detach()[0, :, :, None, None]), stride=2),
}


def operands():
    return torch.randn(3, 48, 64, requires_grad=True), torch.randn(3, 32, 64, requires_grad=True)


@torch.library.custom_op("octavo_tests::times", mutates_args=())
def times(x: torch.Tensor, weight_KN: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
    """An operator of another library: x W + shift."""
    return x @ weight_KN + shift


times.register_fake(lambda x, weight_KN, shift=0.0: x.new_empty(*x.shape[:-1], weight_KN.shape[1]))
OWN = "octavo_tests::times"


def read_times(x, weight_KN, shift=0.0):
    return ("matmul", x, weight_KN) if not shift else ("relu", x)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_operator_of_another_library_is_registered(compiled):
    (a, b), lists = operands(), Operators().with_own(OWN, read_times)
    x, weight = a[0].detach(), b[0].detach().t()

    def both(x):
        return torch.ops.octavo_tests.times(x, weight), torch.ops.octavo_tests.times.default(x, weight, 1.0)

    function = torch.compile(both, backend="aot_eager", fullgraph=True) if compiled else both
    with octavo.autocast("rowwise", lists) as seen, kernels.record() as ledger:
        y, shifted = function(x)
    with octavo.autocast("rowwise"):
        assert torch.equal(y, x @ weight)
    assert not torch.equal(y, x @ weight)
    assert torch.equal(shifted, times(x, weight, 1.0)) and ledger.gemms.total() == 1
    assert seen.fp8(OWN) == 1 and set(seen.kept(OWN)) == {"its reader says 'relu', which is not white"}
    with octavo.autocast("rowwise", lists.to_black(OWN, "mine")) as seen:
        y = times(x, weight)
    assert torch.equal(y, x @ weight) and seen.kept(OWN) == {"mine": 1}
    with octavo.autocast("rowwise") as seen:
        times(x, weight)
    assert seen.fp8(OWN) == 0


@pytest.mark.parametrize("name", WHITE)
def test_values_and_gradients_against_float64(name):
    a, b = operands()
    with octavo.autocast() as seen, kernels.record() as ledger:
        y = WHITE[name](a, b)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert sum(ledger.gemms.values()) >= 1
    operator = name.partition(",")[0].split()[0].replace("@", "matmul").removeprefix("Tensor.")
    assert seen.calls == {(operator, ""): 1}

    exact_a, exact_b = (x.detach().double().requires_grad_() for x in (a, b))
    exact = WHITE[name](exact_a, exact_b)
    exact.backward(dy.double())
    assert y.shape == exact.shape and y.dtype == torch.float32
    assert sqnr_db(exact.detach(), y.detach()) >= 27
    for x, expected in ((a, exact_a), (b, exact_b)):
        if expected.grad is not None:
            used = expected.grad != 0
            assert sqnr_db(expected.grad[used], x.grad[used]) >= 27


def test_two_dtypes_on_the_meta_device_are_named():
    x, weight = torch.ones(4, 64, device="meta"), torch.ones(32, 64, device="meta", dtype=torch.bfloat16)
    with octavo.autocast() as seen:
        F.linear(x, weight)
    assert seen.kept("linear") == {"its operands have different dtypes": 1}


def test_black_operators_and_others_are_bit_for_bit_those_without():
    x, table, target = torch.randn(8, 64), torch.randn(10, 64), torch.arange(8)

    def run():
        return [
            F.layer_norm(x, (64,)),
            F.rms_norm(x, (64,)),
            x.softmax(-1),
            F.embedding(target, table),
            F.cross_entropy(x, target),
            F.scaled_dot_product_attention(x[None], x[None], x[None]),
            x.topk(2).values,
            F.silu(x) + 1,
        ]

    expected = run()
    with octavo.autocast() as seen, kernels.record() as ledger:
        found = run()
    assert all(torch.equal(y, z) for y, z in zip(found, expected, strict=True))
    assert not ledger.gemms
    reasons = Operators().black
    names = ("layer_norm", "rms_norm", "softmax", "embedding", "cross_entropy", "scaled_dot_product_attention", "topk")
    assert seen.calls == {(name, reasons[name]): 1 for name in names}


AS_IT_IS = {
    "fewer than `min_features`": lambda a, b: a[0] @ b[0].t()[:, :16],
    "a batch whose sizes are no multiples of `multiple`": lambda a, b: a[:, 1:] @ b.mT,
    "a vector is no matrix": lambda a, b: a @ b[0, 0],
    "an operand is torch.float64": lambda a, b: a.double() @ b.double().mT,
    "called with out": lambda a, b: torch.mm(a[0].detach(), b[0].t().detach(), out=torch.empty(48, 32)),
    "an einsum of other than two operands": lambda a, b: torch.einsum("hqd->hq", a),
    "an einsum that is no matrix product": lambda a, b: torch.einsum("qd,kd->qkd", a[0], b[0]),
    "an einsum with dots or with a letter twice in a term": lambda a, b: torch.einsum("...qd,...kd->...qk", a, b),
    "its weight is no parameter": lambda a, b: F.conv1d(a.mT, b.mT.reshape(32, 64, 3) * 1),
    "groups: each is a small product of its own": lambda a, b: F.conv1d(a.mT, b.mT.reshape(96, 32, 2), groups=2),
}


@pytest.mark.parametrize("why", AS_IT_IS)
def test_what_cannot_be_fp8_runs_as_it_is_and_says_why(why):
    a, b = operands()
    with octavo.autocast() as seen, kernels.record() as ledger:
        y = AS_IT_IS[why](a, b)
    assert torch.equal(y, AS_IT_IS[why](a, b))
    assert [reason for _, reason in seen.calls] == [why] and not ledger.gemms


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: a[0] @ b[0],
        lambda a, b: torch.mm(a, b),
        lambda a, b: torch.mv(a, b[0, 0]),
        lambda a, b: a[0, 0] @ b[0],
        lambda a, b: torch.bmm(a, b.mT[:2]),
        lambda a, b: F.linear(a),
        lambda a, b: F.linear(a, None),
        lambda a, b: torch.einsum("hqd,hkd->hqk", a[0], b),
        lambda a, b: a @ b.mT.bfloat16(),
    ],
)
def test_wrong_calls_raise_what_pytorch_raises(call):
    a, b = operands()
    with pytest.raises((RuntimeError, TypeError)) as expected:
        call(a, b)
    with octavo.autocast(), pytest.raises(type(expected.value)) as found:
        call(a, b)
    assert str(found.value) == str(expected.value)


def test_edits_of_the_lists_take_effect():
    a, b = operands()
    lists = Operators().to_black("bmm", "mine").without("softmax")
    with octavo.autocast(operators=lists) as seen:
        y = torch.bmm(a, b.mT).softmax(-1) @ b
    assert seen.calls == {("bmm", "mine"): 1, ("matmul", ""): 1}
    assert seen.kept("bmm") == {"mine": 1} and y.shape == (3, 48, 64)
    with octavo.autocast(operators=Operators(min_features=128)) as seen:
        torch.bmm(a, b.mT)
    assert seen.kept("bmm") == {"fewer than `min_features`": 1}


def test_precision_follows_torch_autocast():
    a, b = operands()
    weight = nn.Parameter(torch.randn(32, 64))
    with torch.autocast("cpu", torch.bfloat16), octavo.autocast() as seen:
        y = F.linear(a, weight, torch.ones(32)) + a.bfloat16() @ b.mT
    assert y.dtype == torch.bfloat16 and seen.fp8("matmul") == seen.fp8("linear") == 1
    y.sum().backward()
    assert a.grad.dtype == weight.grad.dtype == torch.float32


def test_each_product_quantises_the_weight_of_now():
    x, weight = torch.randn(32, 64), nn.Parameter(torch.randn(48, 64))
    with octavo.autocast(), kernels.record() as ledger:
        for _ in range(2):
            F.linear(x, weight)
            x @ weight.t()
            weight.mv(x[0])
            torch.einsum("mk,nk->mn", x, weight)
        assert ledger.weights == 8
        activation = weight.detach() * 1
        before = F.linear(x, activation), x @ activation.t()
        activation.data.neg_()  # moves no version counter
        after = F.linear(x, activation), x @ activation.t()
    assert ledger.weights == 8  # an activation is none
    assert all(torch.equal(y, -z) for y, z in zip(after, before, strict=True))


def test_a_transposed_parameter_gets_its_gradient():
    x, weight = torch.randn(32, 64), nn.Parameter(torch.randn(48, 64))
    with octavo.autocast():
        F.linear(x, weight).square().sum().backward()
        expected, weight.grad = weight.grad, None
        (x @ weight.t()).square().sum().backward()
        assert torch.equal(weight.grad, expected)
        weight.grad = None
        with torch.no_grad():
            view = weight.t()
        (x @ view).sum().backward()
        assert weight.grad is None  # as without the block


class Transformer(nn.Module):
    """Raw parameters and hand-written attention: not one module with a GEMM."""

    def __init__(self, width=64, heads=2, vocab=96, blocks=2):
        super().__init__()
        shapes = {
            "qkv": (3 * width, width),
            "out": (width, width),
            "up": (2 * width, width),
            "down": (width, 2 * width),
        }
        self.heads, self.table = heads, nn.Parameter(torch.randn(vocab, width) * 0.3)
        self.blocks = nn.ModuleList(
            nn.ParameterDict({name: torch.randn(shape) * 0.1 for name, shape in shapes.items()}) for _ in range(blocks)
        )

    def forward(self, tokens):
        x = F.embedding(tokens, self.table)
        batch, length, width = x.shape
        for block in self.blocks:
            qkv = F.linear(F.rms_norm(x, (width,)), block["qkv"]).view(batch, length, 3, self.heads, -1)
            q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in qkv.unbind(2))
            p = F.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.1, -1)
            y = torch.bmm(p, v).view(batch, self.heads, length, -1).transpose(1, 2).flatten(2)
            x = x + F.linear(y, block["out"])
            x = x + F.relu(F.rms_norm(x, (width,)) @ block["up"].t()) @ block["down"].t()
        return F.linear(x, self.table)


def train(model, steps, block):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(96, (4, 33))
    losses = []
    for _ in range(steps):
        with block():
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_a_hand_written_transformer_trains_and_is_counted():
    reports = []

    def block():
        mode = octavo.autocast()
        reports.append(mode.seen)
        return mode

    torch.manual_seed(0)
    model = Transformer()
    with kernels.record() as ledger:
        losses = train(model, 25, block)
    torch.manual_seed(0)
    plain = train(Transformer(), 25, lambda: octavo.autocast(enabled=False))
    assert losses[-1] < 0.5 * losses[0]
    assert abs(losses[-1] - plain[-1]) < 0.1 * plain[0] and losses != plain

    black = Operators().black
    kept = {name: {black[name]: count} for name, count in (("softmax", 2), ("rms_norm", 4), ("embedding", 1))}
    assert {("linear", ""): 5, ("matmul", ""): 4, ("bmm", ""): 4}.items() <= reports[-1].calls.items()
    assert all(reports[-1].kept(name) == reasons for name, reasons in kept.items())
    # Forward, and two gradients: 9 products with a parameter, 4 batches of 4 batch elements x 2 heads.
    assert sum(ledger.gemms.values()) == 25 * 3 * (9 + 4 * 8)
    assert not ledger.fallbacks


def test_converted_modules_are_not_seen_and_kept_layers_stay_as_the_plan_says():
    model = nn.ModuleDict({"up": nn.Linear(64, 64), "lm_head": nn.Linear(64, 64)})
    plain, x = model["lm_head"](torch.ones(4, 64)), torch.randn(4, 64)
    octavo.convert(model, recipe="rowwise_bf16_wgrad")
    expected = model["up"](x)
    with octavo.autocast() as seen, kernels.record() as ledger:
        y = model["up"](x)
        assert torch.equal(model["lm_head"](torch.ones(4, 64)), plain)
        torch.autograd.backward(y.sum())
    assert torch.equal(y, expected)
    assert seen.calls == {("linear", "output head: its error goes straight into the loss"): 1}
    assert sum(ledger.gemms.values()) == 1  # fprop; x needs no gradient, wgrad is BF16
    octavo.revert(model)
    with octavo.autocast() as seen:
        model["lm_head"](x), model["up"](x)
    assert seen.calls == {("linear", ""): 2}


def assigned(model):
    model["lm_head"].weight = nn.Parameter(torch.randn(64, 64))
    return model


def reloaded(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


def emptied(model):
    return model.to("meta").to_empty(device="cpu")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", [copy.deepcopy, reloaded, assigned, emptied])
def test_layers_that_the_plan_keeps_stay_so_whichever_tensor_is_their_weight(change, compiled):
    model = nn.ModuleDict({"up": nn.Linear(64, 64), "lm_head": nn.Linear(64, 64)})
    octavo.convert(model)
    model = change(model)
    head = torch.compile(model["lm_head"], backend="eager") if compiled else model["lm_head"]
    with octavo.autocast() as seen:
        head(torch.ones(4, 64))
    kept = {("linear", "output head: its error goes straight into the loss"): 1}
    assert (seen.compiled if compiled else seen.calls) == kept
    octavo.revert(model)
    torch.compiler.reset()
    with octavo.autocast() as seen:
        model["lm_head"](torch.ones(4, 64))
    assert seen.calls == {("linear", ""): 1}


def test_a_weight_that_is_replaced_inside_a_block_is_kept():
    model = nn.ModuleDict({"lm_head": nn.Linear(64, 64)})
    octavo.convert(model)
    with octavo.autocast() as seen:
        torch.func.functional_call(model["lm_head"], {"weight": torch.randn(64, 64)}, torch.ones(4, 64))
        nn.functional.linear(torch.ones(4, 64), model["lm_head"].weight.data)
    assert seen.calls == {("linear", "output head: its error goes straight into the loss"): 2}


def test_what_kernels_multiply_themselves_is_not_seen():
    layer = GroupedLinear(3, 64, 64, recipe="rowwise_bf16_wgrad")
    x, ends = torch.randn(12, 64, requires_grad=True), torch.tensor([4, 4, 12], dtype=torch.int32)
    with octavo.autocast() as seen:
        torch.autograd.backward(layer(x, ends).sum())
    assert not seen.calls
    kernels_of = Path(octavo.__file__).parent / "kernels"
    products = [
        f"{path.name}:{node.lineno}"
        for path in kernels_of.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
    ]
    assert not products, f"write octavo.kernels.product.product: {products}"


def test_a_layer_whose_forward_is_bf16_stays_so():
    x = torch.randn(4, 64, requires_grad=True)
    layer = Linear(64, 64, recipe="bf16")
    expected = layer(x)
    with octavo.autocast() as seen, kernels.record() as ledger:
        y = layer(x)
        torch.autograd.backward(y.sum())
    assert torch.equal(y, expected) and not seen.calls and not ledger.gemms


def test_blocks_nest_and_disabled_ends_them():
    x, weight = torch.randn(32, 64), nn.Parameter(torch.randn(48, 64))
    plain = F.linear(x, weight)
    with octavo.autocast() as outer:
        fp8 = F.linear(x, weight)
        with octavo.autocast(enabled=False) as off:
            assert torch.equal(F.linear(x, weight), plain)
        with octavo.autocast("bf16") as inner:
            assert torch.equal(F.linear(x, weight), plain)
        with octavo.disabled(nn.Linear(1, 1)):
            assert torch.equal(F.linear(x, weight), plain)
        assert torch.equal(F.linear(x, weight), fp8)
    assert not torch.equal(fp8, plain)
    assert torch.equal(F.linear(x, weight), plain)
    assert outer.calls == {("linear", ""): 2} and not off.calls
    assert inner.calls == {("linear", "the recipe says bf16"): 1}


def test_an_object_goes_on_counting_in_its_next_block():
    x, weight = torch.randn(32, 64), nn.Parameter(torch.randn(48, 64))
    mode = octavo.autocast()
    for _ in range(3):
        with mode as seen:
            F.linear(x, weight)
    assert seen is mode.seen and seen.fp8("linear") == 3


def test_an_object_may_be_nested_in_itself():
    x, weight = torch.randn(32, 64), nn.Parameter(torch.randn(48, 64))
    mode = octavo.autocast()
    with mode as seen, octavo.disabled(nn.Linear(1, 1)):
        F.linear(x, weight)
        with mode:
            F.linear(x, weight)
        F.linear(x, weight)
    assert seen.fp8("linear") == 1
    with mode:
        with mode:
            F.linear(x, weight)
        F.linear(x, weight)
    assert seen.fp8("linear") == 3


def test_a_model_is_looked_at_without_the_block():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = (nn.Linear(*shape, bias=False) for shape in ((64, 96), (64, 96), (96, 64)))

        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    with octavo.autocast() as seen:
        assert octavo.plan(Gated()).structures[0].kind == "mlp"
    assert not seen.calls


def test_recipes_that_keep_scales_are_refused():
    with pytest.raises(ConfigError, match="'delayed' keeps scales from step to step"):
        octavo.autocast("delayed")
    with pytest.raises(ConfigError, match="Did you mean 'folded'"):
        octavo.autocast("foldet")


def test_a_checkpoint_with_the_block_inside_recomputes_in_fp8():
    x, weight = torch.randn(32, 64, requires_grad=True), nn.Parameter(torch.randn(48, 64))

    def part(x):
        with octavo.autocast():
            return F.linear(x, weight).relu()

    part(x).sum().backward()
    expected, weight.grad = weight.grad, None
    for reentrant in (True, False):
        with kernels.record() as ledger:
            checkpoint(part, x, use_reentrant=reentrant).sum().backward()
        assert torch.equal(weight.grad, expected) and sum(ledger.gemms.values()) == 4
        weight.grad = None


def test_a_checkpoint_under_the_block_is_refused_by_pytorch():
    x, weight = torch.randn(32, 64, requires_grad=True), nn.Parameter(torch.randn(48, 64))
    with octavo.autocast(), pytest.raises(torch.utils.checkpoint.CheckpointError):
        checkpoint(lambda x: F.linear(x, weight).relu(), x, use_reentrant=False).sum().backward()


class TestCompiled:
    """A function compiled whole, called under blocks."""

    def compiled(self, weight):
        torch._dynamo.reset()

        def function(x):
            y = F.linear(x, weight)
            return torch.bmm(y.expand(2, *y.shape), y.t().expand(2, -1, -1)).softmax(-1)

        return function, torch.compile(function, backend="aot_eager", fullgraph=True)

    def test_gives_what_eager_gives_and_is_compiled_once(self):
        x, weight = torch.randn(32, 64, requires_grad=True), nn.Parameter(torch.randn(48, 64))
        function, fast = self.compiled(weight)
        with octavo.autocast(), kernels.record() as expected:
            y = function(x)
            y.square().sum().backward()
        dx, x.grad = x.grad, None
        reports = []
        for _ in range(3):
            x.grad = None
            with octavo.autocast() as seen, kernels.record() as ledger:
                z = fast(x)
                z.square().sum().backward()
            assert torch.equal(z, y) and ledger.gemms == expected.gemms
            assert torch.allclose(x.grad, dx, rtol=1e-5, atol=1e-6)
            reports.append(seen)
        assert reports[0].compiled == {("linear", ""): 1, ("bmm", ""): 1, ("softmax", Operators().black["softmax"]): 1}
        assert not reports[0].calls and not reports[1].compiled and not reports[2].compiled

    def test_other_blocks_are_other_code(self):
        x, weight = torch.randn(32, 64), nn.Parameter(torch.randn(48, 64))
        function, fast = self.compiled(weight)

        def gemms(*args, **kwargs):
            with octavo.autocast(*args, **kwargs), kernels.record() as ledger:
                y = fast(x)
                assert torch.equal(y, function(x))
            return sum(ledger.gemms.values()) // 2

        assert gemms() == 3
        assert gemms(operators=Operators().to_black("bmm")) == 1
        assert gemms("bf16") == 0
        assert gemms(enabled=False) == 0
        assert torch.equal(fast(x), function(x))  # outside of every block
        with octavo.autocast(), octavo.disabled(nn.Linear(1, 1)), kernels.record() as ledger:
            fast(x)
        assert not ledger.gemms
        assert gemms() == 3

    def test_sizes_that_vary(self):
        weight = nn.Parameter(torch.randn(48, 64))
        function, fast = self.compiled(weight)
        for rows, lists in ((32, Operators()), (48, Operators(min_features=33)), (50, Operators(min_features=33))):
            x = torch.randn(rows, 64)
            with octavo.autocast(operators=lists), kernels.record() as ledger:
                y = fast(x)
            assert sum(ledger.gemms.values()) == (1 if rows == 50 else 3)
            with octavo.autocast(operators=lists):
                assert torch.equal(y, function(x))

    def test_a_block_cannot_begin_in_compiled_code(self):
        torch._dynamo.reset()

        def function(x):
            with octavo.autocast():
                return x @ x.t()

        with pytest.raises(torch._dynamo.exc.Unsupported, match="cannot begin in compiled code"):
            torch.compile(function, backend="aot_eager", fullgraph=True)(torch.randn(32, 32))
        torch._dynamo.reset()
        with kernels.record() as ledger:
            torch.compile(function, backend="aot_eager")(torch.randn(32, 32))
        assert sum(ledger.gemms.values()) == 1  # it leaves the block to Python


@pytest.mark.gpu
def test_on_a_gpu_small_products_stay_and_large_ones_run_in_one_launch():
    a, b = torch.randn(16, 128, 64, device="cuda"), torch.randn(16, 128, 64, device="cuda")
    with octavo.autocast() as seen, kernels.record() as ledger:
        torch.bmm(a, b.mT)
    assert seen.kept("bmm") == {"too small to gain: below `min_gain`": 1} and not ledger.gemms
    with octavo.autocast(operators=Operators(min_gain=0)) as seen, kernels.record() as ledger:
        torch.bmm(a, b.mT)
    assert seen.fp8("bmm") == 1 and not ledger.fallbacks
    if torch.cuda.get_device_capability()[0] == 9:
        assert ledger.gemms == {"grouped_bmm": 16}
    with octavo.autocast("block", Operators(min_gain=0)) as seen:
        torch.bmm(a, b.mT)
    assert list(seen.kept("bmm")) == ["a batch of more than `max_loop`: the grouped FP8 GEMM takes row scales only"]
