"""Attention whose rotary embedding is Octavo's: which functions are recognised, what is computed, what stays its own.

On a CPU nothing is gained by it, so tests say that it is (`gains`), and the reference kernel runs.
"""

import copy
import functools
import inspect
import io
import sys
import types

import pytest
import torch
from torch import Tensor, nn

from octavo.nn import rotary_attention
from octavo.nn.rotary_attention import RotaryAttention, adopt, find_rotations, rotations_in

HEADS, KV_HEADS, WIDTH, LENGTH = 4, 2, 8, 6
HERE = sys.modules[__name__]


def rotate_half(x):
    """As Hugging Face has it, like the next one."""
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def apply_rotary(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def by_chunks(query, key, cos, sin):
    def turned(x):
        first, second = x.chunk(2, -1)
        (cos1, cos2), (sin1, sin2) = cos[:, None].chunk(2, -1), sin[:, None].chunk(2, -1)
        return torch.cat((first * cos1 - second * sin1, second * cos2 + first * sin2), -1)

    return [turned(query), turned(key)]


def in_fp32(q, k, cos, sin):
    return tuple(y.to(q.dtype) for y in apply_rotary(q.float(), k.float(), cos.float(), sin.float()))


def of_neighbours(q, k, cos, sin):
    def half(x):
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    cos, sin = cos[:, None], sin[:, None]
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def scaled(q, k, cos, sin):
    return tuple(1.01 * y for y in apply_rotary(q, k, cos, sin))


def q_alone(q, k, cos, sin):
    return apply_rotary(q, k, cos, sin)[0], k


CALLS = []


def counting(q, k, cos, sin):
    CALLS.append(1)
    return apply_rotary(q, k, cos, sin)


def dropping(q, k, cos, sin):
    q, k = apply_rotary(q, k, cos, sin)
    return nn.functional.dropout(q, 0.1), k


def in_place(q, k, cos, sin):
    turned = apply_rotary(q, k, cos, sin)
    q.mul_(1)
    return turned


def by_another_order(q, k, sin, cos):
    return apply_rotary(q, k, cos, sin)


def with_a_power(q, k, cos, sin):
    return apply_rotary(q.pow(1), k, cos, sin)  # in FP32 under autocast


class Attention(nn.Module):
    """As those of transformers, with a keyword that is handed on and a cache."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * WIDTH
        self.q, self.k, self.v = (nn.Linear(width, n * WIDTH, bias=False) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.o, self.seen = nn.Linear(width, width, bias=False), []

    def forward(self, x, position_embeddings, cache=None, **kwargs):
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = apply_rotary(q, k, *position_embeddings)
        if cache is not None:
            cache.append((q, k))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, **kwargs)
        return self.o(y.transpose(1, 2).flatten(2))


def renamed(forward):
    @functools.wraps(forward)
    def wrapper(*args, past=None, **kwargs):
        return forward(*args, cache=past, **kwargs)

    return wrapper


class Decorated(Attention):
    @renamed
    def forward(self, x, position_embeddings, cache=None, **kwargs):
        q, k = (layer(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in (self.q, self.k))
        cache.append(apply_rotary(q, k, *position_embeddings))
        return super().forward(x, position_embeddings, **kwargs)


class ByAttribute(Attention):
    """The name is an attribute, not a global."""

    rotate = staticmethod(apply_rotary)

    def forward(self, x, position_embeddings):
        return self.rotate(x, x, *position_embeddings)


def elsewhere(forward):
    class Wrapper:
        def __init__(self):
            self.inner = forward

    wrapper = Wrapper()
    return functools.wraps(forward)(lambda *args, **kwargs: wrapper.inner(*args, **kwargs))


class DecoratedElsewhere(Attention):
    """A copy of the decorator would still call what it has decorated."""

    forward = elsewhere(Attention.forward)


class SettingAGlobal(Attention):
    def forward(self, x, position_embeddings):
        global SET
        SET = x
        return apply_rotary(x, x, *position_embeddings)


@pytest.fixture
def gains(monkeypatch):
    """Say that the kernels gain something here, and count their calls."""
    calls = []
    monkeypatch.setattr(rotary_attention, "gains_by_kernels", lambda device: True)
    rotate = rotary_attention.rotate
    monkeypatch.setattr(rotary_attention, "rotate", lambda x, *tables: (calls.append(x), rotate(x, *tables))[1])
    return calls


def tables(dtype: torch.dtype = torch.float32, batch: int = 1) -> tuple[Tensor, Tensor]:
    angles = torch.randn(batch, LENGTH, WIDTH)  # halves that differ, which transformers never has
    return angles.cos().to(dtype), angles.sin().to(dtype)


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, LENGTH, HEADS * WIDTH).to(dtype)


# --- which functions are recognised ---------------------------------------------------------------------------------


def calling(function):
    """A forward that calls a function by a global name of its own."""
    namespace = {"rotated": function, "__name__": __name__}
    exec("def forward(self, q, k, cos, sin): return rotated(q, k, cos, sin)", namespace)
    return namespace["forward"]


@pytest.mark.parametrize("function", [apply_rotary, by_chunks, in_fp32], ids=lambda f: f.__name__)
def test_recognised(function):
    assert find_rotations(calling(function)) == {"rotated": function}


def as_a_module(function):
    """As the package `kernels` makes a module of a function that its hub may replace."""

    class Func(nn.Module):
        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    Func.forward.__signature__ = inspect.Signature([own, *inspect.signature(function).parameters.values()])
    return Func()


def test_a_function_that_a_module_stands_for(monkeypatch, gains):
    assert find_rotations(calling(as_a_module(of_neighbours))) == {}
    function = as_a_module(apply_rotary)
    assert find_rotations(calling(function)) == {"rotated": function}
    monkeypatch.setattr(HERE, "apply_rotary", function)
    module, x, positions = Attention(), inputs(), tables()
    adopt(module)
    module(x, positions)
    assert len(gains) == 2 and function.training
    function.forward = types.MethodType(lambda self, q, k, cos, sin: (q, k), function)  # as the hub replaces it
    assert torch.equal(module(x, positions), Attention.forward(module, x, positions)) and len(gains) == 2
    assert find_rotations(calling(function)) == {}
    del function.forward
    handle = function.register_forward_hook(lambda *_: None)
    module(x, positions)
    assert len(gains) == 2
    handle.remove()
    module(x, positions)
    assert len(gains) == 4


OTHERS = [
    of_neighbours, scaled, q_alone, counting, dropping, in_place, by_another_order, with_a_power, torch.add, len, None,
]  # fmt: skip


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: getattr(f, "__name__", "no function"))
def test_not_recognised(function):
    assert find_rotations(calling(function)) == {}


def test_only_functions_that_a_forward_calls_by_a_global_name():
    assert rotations_in(Attention(), {}) == rotations_in(Decorated(), {}) == ("apply_rotary",)
    assert (
        rotations_in(DecoratedElsewhere(), {})
        == rotations_in(ByAttribute(), {})
        == rotations_in(SettingAGlobal(), {})
        == ()
    )
    assert rotations_in(nn.Linear(2, 2), {}) == rotations_in(nn.Sequential(), {}) == ()
    hooked = Attention()
    hooked.forward = functools.partial(hooked.forward)  # as hooks of accelerate do
    assert rotations_in(hooked, {}) == ()


def test_the_forward_of_a_class_is_judged_once(monkeypatch):
    judged = {}
    assert rotations_in(Attention(), judged) == ("apply_rotary",)
    monkeypatch.setattr(rotary_attention, "find_rotations", None)
    assert rotations_in(Attention(), judged) == ("apply_rotary",)


# --- what is computed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_values_gradients_and_layout_are_the_functions(dtype, batch, gains):
    q = torch.randn(2, LENGTH, HEADS, WIDTH).to(dtype).transpose(1, 2)
    k = torch.randn(2, LENGTH, KV_HEADS, WIDTH).to(dtype).transpose(1, 2)
    cos, sin = tables(dtype, batch)
    dy = torch.randn(q.shape).to(dtype), torch.randn(k.shape).to(dtype)
    results = []
    for run, wide in ((rotary_attention.Rotation(apply_rotary), False), (apply_rotary, False), (apply_rotary, True)):
        given = [(x.double() if wide else x).detach().requires_grad_() for x in (q, k)]
        made = run(*given, *((t.double() if wide else t) for t in (cos, sin)))
        torch.autograd.backward(made, [d.double() if wide else d for d in dy])
        results.append([*made, *(x.grad for x in given)])
    assert len(gains) == 2
    unit = torch.finfo(dtype).eps
    for mine, theirs, exact in zip(*results, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        # One rounding, half a unit of the result, beside FP32 sums of two products.
        bound = 0.5 * unit * exact.abs() + 4 * 2**-23 * exact.abs().amax(-1, keepdim=True)
        assert bool(((mine.double() - exact).abs() <= bound).all())


def test_an_attention_computes_what_it_did_with_its_cache_and_keywords(gains):
    module, x, positions, cache = Attention(), inputs(), tables(), []
    want = module(x, positions, scale=0.5)
    names = list(module.state_dict())
    adopt(module)
    y = module(x, positions, cache, scale=0.5)
    torch.testing.assert_close(y, want)
    assert len(gains) == 2 and len(cache) == 1 and list(module.state_dict()) == names
    torch.testing.assert_close(cache[0], apply_rotary(gains[0].transpose(1, 2), gains[1].transpose(1, 2), *positions))
    module.release()
    assert type(module) is Attention and torch.equal(module(x, positions, scale=0.5), want) and len(gains) == 2


def test_a_decorated_forward_that_calls_its_base(gains):
    module, cache = Decorated(), []
    want = module(inputs().zero_(), tables(), past=[])
    adopt(module)
    assert torch.equal(module(inputs().zero_(), tables(), past=cache), want)
    assert len(gains) == 2 and len(cache) == 1  # the base's forward is another function


def test_nothing_but_the_tables_is_saved(gains):
    module, positions, kept = Attention(), tables(), []
    adopt(module)
    q, k = torch.randn(2, HEADS, LENGTH, WIDTH, requires_grad=True), torch.randn(2, KV_HEADS, LENGTH, WIDTH)
    run = rotary_attention.Rotation(apply_rotary)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        run(q, k, *positions)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in positions}


CPU_CASES = {
    "tables that are trained": lambda q, k, cos, sin: ((q, k, cos.requires_grad_(), sin), {}),
    "tables of another dtype": lambda q, k, cos, sin: ((q.bfloat16(), k.bfloat16(), cos, sin), {}),
    "an argument by name": lambda q, k, cos, sin: ((q, k), {"cos": cos, "sin": sin}),
    "another dimension": lambda q, k, cos, sin: ((q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2), {}),
    "FP64": lambda *given: (tuple(x.double() for x in given), {}),
    "tables of one sequence": lambda q, k, cos, sin: ((q[0, :, None], k[0, :, None], cos[0, :1], sin[0, :1]), {}),
    "no subclass": lambda q, *others: ((q.as_subclass(Sub), *others), {}),
}


class Sub(Tensor):
    pass


@pytest.mark.parametrize("what", CPU_CASES)
def test_what_the_function_computes_itself(what, gains):
    q, k = torch.randn(2, HEADS, LENGTH, WIDTH), torch.randn(2, KV_HEADS, LENGTH, WIDTH)
    args, kwargs = CPU_CASES[what](q, k, *tables())
    made, want = rotary_attention.Rotation(apply_rotary)(*args, **kwargs), apply_rotary(*args, **kwargs)
    assert not gains and all(torch.equal(a, b) and type(a) is type(b) for a, b in zip(made, want, strict=True))


def test_everything_on_a_cpu():
    module, x, positions = Attention(), inputs(torch.bfloat16), tables(torch.bfloat16)
    module.bfloat16()
    want = module(x, positions)
    adopt(module)
    assert torch.equal(module(x, positions), want)


# --- what changes later ---------------------------------------------------------------------------------------------


def test_a_function_that_is_replaced_or_changed_later_runs(monkeypatch, gains):
    module, x, positions = Attention(), inputs(), tables()
    adopt(module)
    module(x, positions)
    assert len(gains) == 2
    with monkeypatch.context() as patch:
        patch.setattr(HERE, "apply_rotary", lambda q, k, cos, sin: (q, k))
        want = Attention.forward(module, x, positions)
        assert torch.equal(module(x, positions), want) and len(gains) == 2
    with monkeypatch.context() as patch:
        patch.setattr(HERE, "rotate_half", lambda x: -x)
        module(x, positions)
        assert len(gains) == 2
    with monkeypatch.context() as patch:
        patch.setattr(apply_rotary, "__code__", (lambda q, k, cos, sin, unsqueeze_dim=1: (q, k)).__code__)
        module(x, positions)
        assert len(gains) == 2
    for owner, name, value in (
        (Attention, "forward", lambda self, x, positions: x),
        (Attention.forward, "__code__", (lambda self, x, positions, cache=None, **kwargs: x).__code__),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert module(x, positions) is x and len(gains) == 2
    with monkeypatch.context() as patch:
        patch.setattr(HERE, "WIDTH", 2 * WIDTH)  # other globals are as they are now
        with pytest.raises(RuntimeError):
            module(x, positions)
    gains.clear()
    module(x, positions)
    assert len(gains) == 2


def test_a_forward_that_is_replaced_or_changed_later_runs(monkeypatch, gains):
    """As libraries do that patch a class of transformers after a conversion."""
    module, x, positions = Attention(), inputs(), tables()
    adopt(module)
    module(x, positions)
    with monkeypatch.context() as patch:
        patch.setattr(Attention, "forward", lambda self, x, position_embeddings: x)
        assert module(x, positions) is x
    with monkeypatch.context() as patch:
        patch.setattr(Attention.forward, "__code__", (lambda self, x, positions, cache=None, **kwargs: x).__code__)
        assert module(x, positions) is x
    gains.clear()
    module(x, positions)
    assert len(gains) == 2


def test_adopting_again_recognises_again(monkeypatch, gains):
    module = Attention()
    adopt(module)
    monkeypatch.setattr(HERE, "apply_rotary", by_chunks)
    module(inputs(), tables())
    assert not gains
    module.release()
    assert rotations_in(module, {}) == ("apply_rotary",)
    adopt(module)
    module(inputs(), tables())
    assert len(gains) == 2


def test_copies_and_files(gains):
    module, x, positions = Attention(), inputs(), tables()
    adopt(module)
    want = module(x, positions)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    type(module).rebound = None  # as in another process
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        gains.clear()
        assert isinstance(other, RotaryAttention) and torch.equal(other(x, positions), want) and len(gains) == 2


def test_a_file_that_is_read_where_its_class_has_a_forward_that_hides_another(monkeypatch, gains):
    module, x, positions = Attention(), inputs(), tables()
    want, held = module(x, positions), [Attention.forward]
    adopt(module)
    type(module).rebound = None  # as in another process
    monkeypatch.setattr(Attention, "forward", functools.wraps(held[0])(lambda *args: held[0](*args)))
    assert torch.equal(module(x, positions), want) and not gains


def test_what_is_switched_off(gains):
    module, x, positions = Attention(), inputs(), tables()
    want = module(x, positions)
    adopt(module)
    module.enabled = False
    assert torch.equal(module(x, positions), want) and not gains


def test_compiled_code_is_the_parents(gains):
    module, x, positions = Attention(), inputs(), tables()
    want = module(x, positions)
    adopt(module)
    assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(x, positions), want) and not gains


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype):
    module, x = Attention().to("cuda", dtype), inputs(dtype).cuda()
    positions = tuple(t.cuda() for t in tables(dtype))
    other = copy.deepcopy(module)
    adopt(module)
    results = []
    for run in (module, other):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = run(leaf, positions)
        y.square().sum().backward()
        results.append((y, leaf.grad))
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))
