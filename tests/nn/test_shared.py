"""Layers that share an input: one joint computation, which nobody can tell from separate layers but by its speed."""

import copy
import ctypes
import io
import operator
import pickle
from concurrent.futures import ThreadPoolExecutor
from weakref import ref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import kernels
from octavo.errors import UnsupportedError
from octavo.nn import Linear, functional, seal
from octavo.nn.shared import SharedInput
from octavo.numerics import sqnr_db
from octavo.recipes import load, names

FP8 = [name for name in names() if load(name).is_fp8]
every_recipe = pytest.mark.parametrize("recipe", FP8)


class Attention(nn.Module):
    """What reads one input three times, with and without biases."""

    def __init__(self, recipe: str = "folded", width: int = 136, rows: tuple[int, ...] = (128, 128, 24)) -> None:
        super().__init__()
        chosen = load(recipe)
        for name, n, bias in zip("qkv", rows, (True, False, True), strict=True):
            layer = nn.Linear(width, n, bias=bias)
            Linear.adopt(layer, chosen)
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x).square(), self.v(x).sin()], dim=-1)


def shared(*args, **kwargs) -> Attention:
    model = Attention(*args, **kwargs)
    group = SharedInput([model.q, model.k, model.v])
    for layer in group.layers:
        layer.shared = group
    return model


def alone(model: Attention) -> Attention:
    twin = copy.deepcopy(model)
    for layer in (twin.q, twin.k, twin.v):
        layer.shared = None
    return twin


def waiting(model: Attention, x: Tensor) -> list[int]:
    """Positions of the layers whose outputs for x nobody has asked for."""
    return sorted(x._octavo_outputs.by_group[model.q.shared])


def gradients(model: nn.Module, x: Tensor, run=None) -> list[Tensor]:
    """The result, the gradient of x and those of all parameters."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    y = (model if run is None else run)(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --- what it computes -----------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_one_layer_with_the_stack_of_their_weights(recipe, dtype):
    model = shared(recipe).to(dtype)
    x = torch.randn(2, 17, 136, dtype=dtype)
    weight = torch.cat([model.q.weight, model.k.weight, model.v.weight]).detach().requires_grad_()
    whole = x.clone().requires_grad_()
    y = functional.linear(whole, weight, None, load(recipe))
    dy = torch.randn_like(y)
    y.backward(dy)

    x.requires_grad_()
    parts = [model.q(x), model.k(x), model.v(x)]
    q, k, v = y.split([128, 128, 24], -1)
    assert equal(parts, [q + model.q.bias, k, v + model.v.bias])
    torch.autograd.backward(parts, list(dy.split([128, 128, 24], -1)))
    assert torch.equal(x.grad, whole.grad)
    assert torch.equal(torch.cat([model.q.weight.grad, model.k.weight.grad, model.v.weight.grad]), weight.grad)
    assert torch.equal(model.v.bias.grad, dy[..., 256:].sum(dim=(0, 1)))


@pytest.mark.parametrize("recipe", ["folded", "rowwise", "block"])
def test_separate_layers_give_the_same_but_for_the_sum_in_dgrad(recipe):
    # Tiles of separate layers are tiles of the stack here, but for those of a gradient's row, which is now longer: a
    # token has one scale for q, k and v. Forward and wgrad are the same in every bit.
    model = shared(recipe, rows=(128, 128, 128))
    x = torch.randn(40, 136)
    (y, dx, *dws), (y_, dx_, *dws_) = gradients(model, x), gradients(alone(model), x)
    assert torch.equal(y, y_)
    assert equal(dws, dws_)
    assert sqnr_db(dx_, dx) > 25


def test_tensorwise_layers_have_one_scale_together():
    model = shared("tensorwise")
    x = torch.randn(40, 136)
    for one, other in zip(gradients(model, x), gradients(alone(model), x), strict=True):
        assert sqnr_db(other, one) > 25


def test_the_work_is_done_once():
    model, x = shared(), torch.randn(16, 136, requires_grad=True)
    with kernels.record() as ledger:
        model(x).sum().backward()
    assert ledger.weights == 3
    assert sum(ledger.gemms.values()) == 3 + 1 + 1  # fprop for each, dgrad, wgrad
    with kernels.record() as ledger:
        alone(model)(x).sum().backward()
    assert sum(ledger.gemms.values()) == 9


def test_under_autocast():
    model, x = shared(), torch.randn(16, 136, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        parts = [model.q(x), model.k(x), model.v(x)]
    assert {part.dtype for part in parts} == {torch.bfloat16}
    sum(part.float().sum() for part in parts).backward()
    assert x.grad.dtype == model.k.weight.grad.dtype == torch.float32


# --- who is called with what ----------------------------------------------------------------------------------------


def test_a_round_leaves_nothing_behind():
    model, x = shared(), torch.randn(5, 136)
    model(x)
    assert not waiting(model, x)


@pytest.mark.parametrize("order", ["qkv", "vkq", "kqv"])
def test_any_order(order):
    model, x = shared(), torch.randn(5, 136)
    for name in order:
        assert torch.equal(getattr(model, name)(x), getattr(alone(model), name)(x))


def test_a_member_called_with_another_tensor_computes_that():
    model, x, other = shared(), torch.randn(5, 136), torch.randn(7, 136)
    twin = alone(model)
    for _ in range(2):
        assert torch.equal(model.q(x), twin.q(x))
        with kernels.record() as ledger:
            assert torch.equal(model.k(other), twin.k(other))
        assert sum(ledger.gemms.values()) == 2  # ours and the twin's: it computes alone
        assert torch.equal(model.v(x), twin.v(x))


def test_a_tensor_of_the_same_values_is_another_tensor_with_a_gradient_of_its_own():
    model, x = shared(), torch.randn(5, 136, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    (model.q(x).sum() + model.k(other).sum() + model.v(x).sum()).backward()
    assert torch.equal(other.grad, torch.autograd.grad(alone(model).k(other).sum(), other)[0])


def test_a_member_called_twice():
    model, x = shared(), torch.randn(5, 136)
    twin = alone(model)
    first, again = model.q(x), model.q(x)
    assert torch.equal(first, again) and torch.equal(first, twin.q(x))
    assert torch.equal(model.k(x), twin.k(x)) and torch.equal(model.v(x), twin.v(x))


def test_members_that_nobody_calls_have_no_gradient_and_the_others_theirs():
    model, x = shared(), torch.randn(5, 136, requires_grad=True)
    model.k(x).sum().backward()
    twin = alone(model)
    twin.zero_grad()
    twin.k(x.detach()).sum().backward()
    assert torch.equal(model.k.weight.grad, twin.k.weight.grad)
    assert model.q.weight.grad is None and model.v.weight.grad is None


def changed_in_place(model: Attention, x: Tensor) -> None:
    x.mul_(2.0)


def weight_changed(model: Attention, x: Tensor) -> None:
    with torch.no_grad():
        model.k.weight.mul_(2.0)


def weight_replaced(model: Attention, x: Tensor) -> None:
    model.k.weight = nn.Parameter(torch.randn_like(model.k.weight))


def stepped(model: Attention, x: Tensor) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def other_recipe(model: Attention, x: Tensor) -> None:
    model.k.recipe = load("tensorwise")


@pytest.mark.parametrize("change", [changed_in_place, weight_changed, weight_replaced, stepped, other_recipe])
def test_what_changes_between_two_calls_is_seen(change):
    model, x = shared(), torch.randn(5, 136)
    model.q(x)
    change(model, x)
    twin = alone(model)
    assert torch.equal(model.k(x), twin.k(x))
    assert torch.equal(model.v(x), twin.v(x))
    assert torch.equal(model.q(x), twin.q(x))


def test_a_recipe_changed_for_all_between_two_calls_is_seen():
    model, x = shared(), torch.randn(5, 136)
    model.q(x)
    before, other = alone(model).k(x), load("served")
    for layer in (model.q, model.k, model.v):
        layer.recipe = other
    y = model.k(x)
    assert torch.equal(y, alone(model).k(x)) and not torch.equal(y, before)


def test_a_member_with_a_recipe_of_its_own_computes_by_that():
    model, x = shared(), torch.randn(5, 136)
    model.k.recipe = load("tensorwise")
    twin = alone(model)
    assert equal([model.q(x), model.k(x), model.v(x)], [twin.q(x), twin.k(x), twin.v(x)])


UNSEEN = {
    "data": lambda x: x.data.mul_(3),
    "view of data": lambda x: x.data.view(-1)[::2].mul_(3),
    "copy to data": lambda x: x.data.copy_(torch.ones_like(x)),
    "foreach on data": lambda x: torch._foreach_mul_([x.data], 3.0),
    "out": lambda x: torch.mul(x.data, 3, out=x.data),
    "broadcast": lambda x: (x.data.zero_(), dist.broadcast(x.data, 0)),
    "all_gather": lambda x: dist.all_gather([x], torch.ones_like(x)),
    "DLPack": lambda x: torch.from_dlpack(x.detach()).mul_(3),
    "NumPy": lambda x: operator.imul(x.detach().numpy(), 3),
    "pointer": lambda x: ctypes.memset(x.data_ptr(), 0, 64),
    "storage": lambda x: x.untyped_storage().fill_(0),
    "compiled": lambda x: torch.compile(lambda y: y.mul_(3), backend="aot_eager")(x.data),
    "NumPy's array from before": lambda x: operator.imul(x.alias, 3),
    "DLPack's tensor from before": lambda x: x.other.mul_(3),
}
"""Ways of writing to x that its version does not count."""


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("write", UNSEEN.values(), ids=UNSEEN)
def test_a_write_to_the_input_that_no_version_counts_is_seen(write, grad, group):
    model, x = shared(), torch.randn(5, 136)
    x.alias, x.other = x.numpy(), torch.from_dlpack(x)
    with torch.set_grad_enabled(grad):
        model.q(x)
        write(x)
        twin = alone(model)
        assert torch.equal(model.k(x), twin.k(x)) and torch.equal(model.v(x), twin.v(x))


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("write", list(UNSEEN.values())[:10], ids=list(UNSEEN)[:10])
def test_a_write_to_a_parameter_that_no_version_counts_is_seen(write, name, group):
    model, x = shared(), torch.randn(5, 136)
    model.q(x)
    with torch.no_grad():
        write(getattr(model.v, name))
    assert torch.equal(model.v(x), alone(model).v(x)) and torch.equal(model.k(x), alone(model).k(x))


def test_nan_in_the_input_is_not_taken_for_a_write():
    model, x = shared(), torch.randn(5, 136)
    x[0, 0] = torch.nan
    with kernels.record() as ledger:
        model(x)
    assert sum(ledger.gemms.values()) == 3 and ledger.weights == 3


def test_on_a_device_the_input_is_sealed_while_outputs_wait(monkeypatch):
    monkeypatch.setattr(seal, "_compares", lambda x: False)
    monkeypatch.setattr("octavo.nn.shared._on_cpu", lambda layer: [])
    model, x = shared(), torch.randn(5, 136)
    model(x)
    assert not torch._C._is_cow_tensor(x)
    model.q(x)
    assert torch._C._is_cow_tensor(x)
    x.data.mul_(3)
    assert torch.equal(model.k(x), alone(model).k(x)) and torch.equal(model.v(x), alone(model).v(x))
    with kernels.record() as ledger:
        model(torch.from_numpy(np.ones((5, 136), np.float32)))
    assert any("one by one" in reason for reason in ledger.fallbacks)


def test_a_bias_changed_between_two_calls_is_seen():
    model, x = shared(), torch.randn(5, 136)
    model.q(x)
    with torch.no_grad():
        model.v.bias.add_(1.0)
    assert torch.equal(model.v(x), alone(model).v(x))


def test_a_call_without_gradients_does_not_take_them_from_the_next():
    model, x = shared(), torch.randn(5, 136, requires_grad=True)
    with torch.no_grad():
        model.q(x)
    assert model.k(x).requires_grad and model.v(x).requires_grad
    y = torch.randn(5, 136)
    model.requires_grad_(False)
    assert not model.q(y).requires_grad
    y.requires_grad_()
    assert model.k(y).requires_grad


def test_a_call_under_autocast_does_not_change_the_dtype_of_the_next():
    model, x = shared(), torch.randn(5, 136)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.q(x).dtype == torch.bfloat16
    assert model.k(x).dtype == torch.float32


def test_a_round_cut_short_by_an_error_does_no_harm():
    model, x = shared(), torch.randn(5, 136)
    handle = model.k.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    handle.remove()
    assert torch.equal(model(x), alone(model)(x))
    assert not waiting(model, x)


def test_hooks_see_each_layer():
    model, seen = shared(), []
    for name in "qkv":
        getattr(model, name).register_forward_hook(lambda layer, args, y, name=name: seen.append((name, y.shape[-1])))
        getattr(model, name).register_full_backward_hook(lambda layer, dx, dy, name=name: seen.append(name))
    x = torch.randn(5, 136, requires_grad=True)
    model(x).sum().backward()
    assert seen[:3] == [("q", 128), ("k", 128), ("v", 24)] and sorted(seen[3:]) == ["k", "q", "v"]


def test_a_pre_hook_that_changes_the_input_of_one():
    model, x = shared(), torch.randn(5, 136)
    model.k.register_forward_pre_hook(lambda layer, args: (args[0] * 2,))
    expected = torch.cat([alone(model).q(x), alone(model).k(x).square(), alone(model).v(x).sin()], dim=-1)
    assert torch.equal(model(x), expected)


def test_a_disabled_member_computes_in_high_precision_and_is_left_out():
    model, x = shared(), torch.randn(5, 136)
    model.k.enabled = False
    plain = nn.functional.linear(x, model.k.weight)
    with kernels.record() as ledger:
        model.q(x)
        assert torch.equal(model.k(x), plain)
        model.v(x)
    assert sum(ledger.gemms.values()) == 2 and not waiting(model, x)


@pytest.mark.parametrize("frozen", ["q", "k", "qk", "qkv"])
@pytest.mark.parametrize("x_needs", [True, False])
def test_frozen_members(frozen, x_needs):
    model = shared(rows=(128, 128, 128))
    for name in frozen:
        getattr(model, name).weight.requires_grad_(False)
    twin = alone(model)
    for one in (model, twin):
        x = torch.linspace(-1, 1, 5 * 136).reshape(5, 136).requires_grad_(x_needs)
        y = one(x)
        if y.requires_grad:
            y.sum().backward()
        one.dx = x.grad
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)
    assert (model.dx is None) == (twin.dx is None) == (not x_needs)


def test_no_grad_and_inference_mode():
    model, x = shared(), torch.randn(5, 136)
    expected = model(x)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
        assert torch.equal(model(x.clone()), expected)
    assert model(x.requires_grad_()).requires_grad


@pytest.mark.parametrize("shape", [(136,), (0, 136), (2, 0, 136), (1, 1, 136)], ids=str)
def test_any_leading_shape(shape):
    model = shared()
    x = torch.randn(shape, requires_grad=True)
    y = model(x)
    assert y.shape == (*shape[:-1], 280)
    y.sum().backward()
    assert x.grad.shape == x.shape


# --- with the rest of PyTorch ---------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@every_recipe
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(recipe, reentrant):
    model, x = shared(recipe), torch.randn(16, 136)
    again = gradients(model, x, lambda x: checkpoint(model, x, use_reentrant=reentrant))
    assert equal(gradients(model, x), again)


@pytest.mark.parametrize(
    ("recipe", "autocast", "products"),
    [
        ("folded", True, 5),
        ("delayed", False, 5),
        ("block", False, 5),
        pytest.param("rowwise_bf16_wgrad", True, 4, marks=pytest.mark.slow),
        pytest.param("rowwise_bf16_fprop", True, 2, marks=pytest.mark.slow),
    ],
    ids=["folds", "stored scales", "tiles across layers", "wgrad in BF16", "fprop in BF16"],
)
def test_compiled_is_bit_for_bit_eager(recipe, autocast, products):
    """The stack of weights; that `linears` compiles by every recipe is shown in test_functional.py."""
    model, x = shared(recipe), torch.randn(16, 136)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert equal(gradients(model, x), gradients(model, x, compiled))
    with kernels.record() as ledger:
        gradients(model, x, compiled)
    assert sum(ledger.gemms.values()) == products
    torch._dynamo.reset()


class Block(nn.Module):
    """A norm before layers that share its output, as in every transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(136), shared()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.norm(x))


@pytest.mark.parametrize("model", [Block, shared])
def test_compiled_over_a_checkpoint_is_one_graph(model):
    torch._dynamo.reset()
    model, x = model(), torch.randn(16, 136)
    compiled = torch.compile(
        lambda x: checkpoint(model, x, use_reentrant=False), backend="aot_eager", fullgraph=isinstance(model, Block)
    )
    assert equal(gradients(model, x), gradients(model, x, compiled))
    torch._dynamo.reset()


def test_threads_share_a_model():
    model, x = shared(), torch.randn(64, 136)
    expected = model(x)
    inputs = [x.clone() for _ in range(4)] * 8 + [x] * 32  # of their own, and one for all
    with ThreadPoolExecutor(8) as pool:
        assert all(torch.equal(y, expected) for y in pool.map(model, inputs))


def test_the_graph_of_a_failed_forward_goes_with_the_next_call_of_any_group():
    first, second = shared(), shared()

    def fail() -> ref[Tensor]:
        x = torch.randn(5, 136, requires_grad=True)  # its gradient's node holds it: a cycle, by what waits on it
        assert first.q(x).requires_grad and waiting(first, x) == [1, 2]
        return ref(x)

    left = fail()
    second(torch.randn(5, 136))
    assert left() is None


def test_copies_and_files_of_an_input_carry_no_outputs():
    model, x = shared(), torch.randn(5, 136)
    model.q(x)
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    for twin in (copy.deepcopy(x), torch.load(file, weights_only=True)):
        assert torch.equal(model.k(twin), alone(model).k(x))
        assert torch.equal(model(twin), alone(model)(x))


def test_compiled_and_eager_calls_may_alternate():
    model = shared()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(16, 136)
        assert torch.equal(compiled(x), model(x))
        compiled(x).sum().backward()
        optimizer.step()
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(x).sum().backward()
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "write",
    [lambda x: x.flatten()[::2].mul_(3), lambda x: x.data.mul_(3), lambda x: torch._foreach_mul_([x.data], 3.0)],
    ids=["view", "data", "foreach"],
)
@torch.no_grad()
def test_compiled_code_may_write_to_the_input_between_members(write):
    torch._dynamo.reset()

    class Written(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x)
            write(x)
            return torch.cat([q, self.k(x), self.v(x)], dim=-1)

    model, x = Written(), torch.randn(16, 136)
    group = SharedInput([model.q, model.k, model.v])
    for layer in group.layers:
        layer.shared = group
    want = alone(model)(x.clone())
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x.clone()), want)
    torch._dynamo.reset()


def test_a_break_of_the_graph_between_members():
    model, x = shared(), torch.randn(16, 136)

    def run(x: Tensor) -> Tensor:
        q = model.q(x)
        torch._dynamo.graph_break()
        return torch.cat([q, model.k(x).square(), model.v(x).sin()], dim=-1)

    compiled = torch.compile(run, backend="aot_eager")
    for _ in range(2):  # another graph cannot know that x is what it was: k and v are computed alone
        want, got = gradients(model, x), gradients(model, x, compiled)
        assert torch.equal(got[0], want[0]) and all(sqnr_db(a, b) > 25 for a, b in zip(want[1:], got[1:], strict=True))
    torch._dynamo.reset()


def test_functional_call_uses_the_weights_it_is_given():
    model, x = shared(), torch.randn(5, 136)
    others = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    got = torch.func.functional_call(model, others, (x,))
    twin = alone(model)
    twin.load_state_dict(others)
    assert torch.equal(got, twin(x))


class Doubled(nn.Module):
    """A weight that is computed when it is read, and counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.reads += 1
        return weight * 2


def test_a_member_with_a_parametrized_weight_computes_alone_and_reads_it_once():
    model, x = shared(), torch.randn(5, 136)
    parametrize.register_parametrization(model.k, "weight", Doubled())
    twin, computed = alone(model), model.k.parametrizations.weight[0]
    computed.reads = 0
    want, got = gradients(twin, x), gradients(model, x)
    assert computed.reads == 1
    assert equal([got[0], *got[2:]], [want[0], *want[2:]]) and sqnr_db(want[1], got[1]) > 25


@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("recipe", [None, "folded", "rowwise"], ids=["reverted", "same recipe", "other recipe"])
def test_a_member_converted_or_reverted_by_itself_is_no_longer_one(name, recipe):
    model, x = shared(), torch.randn(5, 136)
    member = getattr(model, name)
    if recipe is None:
        octavo.revert(member)
    else:
        octavo.convert(member, recipe, policy=octavo.Policy(min_features=8))
    twin = alone(model)
    with kernels.record() as ledger:
        want, got = gradients(twin, x), gradients(model, x)
    assert equal([got[0], *got[2:]], [want[0], *want[2:]]) and sqnr_db(want[1], got[1]) > 25
    assert sum(ledger.gemms.values()) == (9 + 3 + 4 if recipe else 6 + 4)  # two members are still computed as one


def test_what_changes_between_two_calls_in_inference_mode_is_seen():
    """Inference tensors count no versions."""
    model = shared()
    with torch.inference_mode():
        x = torch.randn(5, 136)
        model.q(x)
        x.mul_(3)
        assert torch.equal(model.k(x), alone(model).k(x))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_compiled_code_may_write_to_a_parameter_between_members(name):
    class Written(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x)
            with torch.no_grad():
                getattr(self.v, name).mul_(3)
            return torch.cat([q, self.k(x), self.v(x)], dim=-1)

    model, x = Written(), torch.randn(16, 136)
    group = SharedInput([model.q, model.k, model.v])
    for layer in group.layers:
        layer.shared = group
    want = alone(model)(x)
    assert torch.equal(torch.compile(model, backend="aot_eager")(x), want)
    torch._dynamo.reset()


# --- scales of the stack ---------------------------------------------------------------------------------------------


def hooked(model: Attention) -> None:
    model.k.register_forward_pre_hook(lambda *_: None)


def all_hooked(model: Attention) -> None:
    for layer in (model.q, model.k, model.v):
        layer.register_forward_pre_hook(lambda *_: None)


def disabled(model: Attention) -> None:
    model.v.enabled = False


def reverted(model: Attention) -> None:
    octavo.revert(model.v)


def by_another_recipe(model: Attention) -> None:
    model.v.recipe = load("folded")


def converted_alone(model: Attention) -> None:
    octavo.convert(model.v, "folded", policy=octavo.Policy(min_features=8))


def parametrized(model: Attention) -> None:
    parametrize.register_parametrization(model.v, "weight", nn.Identity())


def wrapped(model: Attention) -> None:
    """As PEFT does: the layer is the child of another module."""
    model.v = nn.Sequential(model.v)


def with_its_own_forward(model: Attention) -> None:
    model.k.forward = model.k.forward


def nothing(model: Attention) -> None:
    pass


CIRCUMSTANCES = [
    nothing, hooked, all_hooked, disabled, reverted, by_another_recipe, converted_alone, parametrized, wrapped,
    with_its_own_forward,
]  # fmt: skip


def one_large(recipe: str, rows: tuple[int, ...] = (128, 128, 24)) -> Attention:
    """Weights of which each would have another scale of its own."""
    torch.manual_seed(0)
    model = shared(recipe, rows=rows)
    with torch.no_grad():
        model.v.weight.mul_(7.3)
        model.k.weight.mul_(0.11)
    return model


SPANNED = [
    ("tensorwise", (128, 128, 24)),
    ("delayed", (128, 128, 24)),
    ("just_in_time", (64, 64, 24)),
    ("block", (24, 64, 136)),
]


@pytest.mark.covering(2)
@pytest.mark.parametrize(("recipe", "rows"), SPANNED, ids=str)
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CIRCUMSTANCES)
def test_a_member_computes_the_same_whatever_becomes_of_the_others(change, context, recipe, rows):
    model, x = one_large(recipe, rows), torch.randn(16, 136)
    with torch.no_grad():
        q, k = model.q(x), model.k(x)
    change(model)
    with context():
        assert torch.equal(model.q(x), q) and torch.equal(model.k(x), k)
        assert torch.equal(model.k(x.clone()), k) and torch.equal(model.q(x), q)


@pytest.mark.parametrize("recipe", ["tensorwise", "block"])
def test_a_member_alone_has_the_gradients_that_it_has_in_its_group(recipe):
    model, twin = one_large(recipe, (24, 64, 136)), one_large(recipe, (24, 64, 136))
    all_hooked(twin)
    x, dy = torch.randn(16, 136), torch.randn(16, 64)
    grads = []
    for net in (model, twin):
        leaf = x.clone().requires_grad_()
        net.k(leaf).backward(dy)
        grads.append((leaf.grad, net.k.weight.grad))
        assert net.q.weight.grad is None and net.v.weight.grad is None
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


def test_codes_that_are_reused_are_those_of_the_stack():
    model, x = one_large("tensorwise"), torch.randn(16, 136)
    expected = model(x)
    model.v.register_forward_pre_hook(lambda *_: None)
    with torch.no_grad(), octavo.nn.reuse_weight_codes(model):
        assert torch.equal(model(x), expected)


def away(model: Attention) -> None:
    model.k.weight.data = torch.empty(0)


def to_meta(model: Attention) -> None:
    model.k.weight = nn.Parameter(model.k.weight.to("meta"))


@pytest.mark.parametrize("leave", [away, to_meta])
def test_a_scale_of_the_stack_without_the_stack_is_refused(leave):
    model, x = one_large("tensorwise"), torch.randn(16, 136)
    all_hooked(model)
    leave(model)
    with pytest.raises(UnsupportedError, match=r"scales in common.*fuse=False"):
        model.q(x)
    rows = one_large("folded")
    all_hooked(rows)
    expected = rows.q(x)
    leave(rows)
    assert torch.equal(rows.q(x), expected)


def test_a_copy_of_a_member_with_a_weight_of_its_own_is_refused():
    model, x = one_large("tensorwise"), torch.randn(16, 136)
    twin = copy.copy(model.k)
    assert torch.equal(twin(x), model.k(x))
    twin._parameters = {"weight": nn.Parameter(model.k.weight.detach().clone()), "bias": None}
    with pytest.raises(UnsupportedError, match="copy of"):
        twin(x)


@pytest.mark.parametrize("way", ["deepcopy", "file", "copy of a copy"])
def test_a_member_copied_alone_keeps_the_scale_of_the_stack(way):
    model, x = one_large("tensorwise"), torch.randn(16, 136)
    twin = pickle.loads(pickle.dumps(model.k)) if way == "file" else copy.deepcopy(model.k)
    if way == "copy of a copy":
        twin = copy.deepcopy(twin)
    assert twin.shared.layers == (twin,) and torch.equal(twin(x), model.k(x))


def test_compiled_a_member_alone_has_the_scale_of_the_stack():
    model, x = one_large("tensorwise"), torch.randn(16, 136)
    expected = model(x)
    disabled(model)
    model.v.enabled = True
    model.v.recipe = load("folded")
    y = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(y[:, :256], expected[:, :256])
    torch._dynamo.reset()


# --- copies and files -----------------------------------------------------------------------------------------------


def test_a_copy_of_the_module_shares_among_its_own():
    model, x = shared(), torch.randn(5, 136)
    model.q(x)  # a round is open
    twin = copy.deepcopy(model)
    group = twin.q.shared
    assert group is twin.k.shared is twin.v.shared and group is not model.q.shared
    assert group.layers == (twin.q, twin.k, twin.v)
    with torch.no_grad():
        model.k.weight.zero_()
    assert torch.equal(twin(x), alone(twin)(x))


def test_a_shallow_copy_of_a_member_computes_alone():
    model, x = shared(), torch.randn(5, 136)
    twin = copy.copy(model.q)
    with kernels.record() as ledger:
        assert torch.equal(twin(x), model.q(x))
    assert sum(ledger.gemms.values()) == 1 + 3


def test_files_carry_no_activations():
    model, x = shared(), torch.randn(500, 136)
    size = len(pickle.dumps(model))
    model.q(x)
    assert len(pickle.dumps(model)) < size + 1000
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert twin.q.shared is twin.k.shared
    assert torch.equal(twin(x), model(x))


def test_state_dict_is_that_of_plain_layers():
    model = shared()
    model.q(torch.randn(5, 136))
    assert list(model.state_dict()) == ["q.weight", "q.bias", "k.weight", "v.weight", "v.bias"]
    assert all(type(value) is Tensor for value in model.state_dict().values())


def test_released_layers_share_nothing():
    model = shared()
    for layer in (model.q, model.k, model.v):
        layer.release()
    assert not any("shared" in vars(layer) for layer in model.children())


@pytest.mark.parametrize("recipe", ["folded", "tensorwise", "block"])
def test_a_layer_whose_output_is_not_used_has_no_gradient(recipe):
    model = shared(recipe)
    twin, x = alone(model), torch.randn(16, model.q.in_features)
    found = []
    for net in (model, twin):
        leaf = x.clone().requires_grad_()
        q, k, v = net.q(leaf), net.k(leaf), net.v(leaf)
        (q.square().sum() + v.sum()).backward()
        found.append((net.q.weight.grad, net.k.weight.grad, net.v.weight.grad))
        assert k.requires_grad and leaf.grad is not None
    assert found[0][1] is None and found[1][1] is None
    assert found[0][0] is not None and found[0][2] is not None
    if recipe == "folded":  # a scale per row: those of the stack are those of its parts
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][2], found[1][2])


def test_a_member_whose_forward_brings_its_weight_computes_alone():
    """As accelerate's offloading does: the weight is there while its own forward runs, and only then."""
    model, x = shared(), torch.randn(6, 136)
    expected = model(x)
    weight, own = model.k.weight, model.k.forward
    model.k.weight = nn.Parameter(torch.empty_like(weight, device="meta"))

    def forward(y: Tensor) -> Tensor:
        away, model.k.weight = model.k.weight, weight
        try:
            return own(y)
        finally:
            model.k.weight = away

    model.k.forward = forward
    torch.testing.assert_close(model(x), expected)
