"""Blocks whose norms add up the residual stream: bits, fewer sums, and when a block runs as it is."""

import collections
import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from octavo.errors import UnsupportedError
from octavo.kernels.quant_spec import QuantSpec
from octavo.nn import norm, residual
from octavo.nn.attached_codes import attached_codes
from octavo.nn.norm import Norm
from octavo.nn.residual import ResidualBlock, adopt, norms_of_stream

WIDTH = 32
ROW = QuantSpec("e4m3", "row", "power_of_two")
NORMS = "norm1", "norm2"


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden_states, scale=None):
        self.seen = type(hidden_states)
        y = self.linear(hidden_states)
        return (y if scale is None else y * scale), None


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Block(nn.Module):
    """As transformers has it."""

    def __init__(self, centred=False):
        super().__init__()
        kind = nn.LayerNorm if centred else nn.RMSNorm
        self.norm1, self.norm2 = (kind(WIDTH, eps=1e-5) for _ in range(2))
        self.mixer, self.mlp = Mixer(), MLP()

    def forward(self, hidden_states, scale=None):
        kept = hidden_states
        hidden_states = self.norm1(hidden_states)
        hidden_states, _ = self.mixer(hidden_states=hidden_states, scale=scale)
        hidden_states = kept + hidden_states
        kept = hidden_states
        hidden_states = self.mlp(self.norm2(hidden_states))
        return kept + hidden_states


class Scaled(Block):
    """Branches by a factor, as Granite; results in a tuple, as blocks had before."""

    def forward(self, x, scale=None):
        x = x + 0.3 * self.mixer(self.norm1(x), scale)[0]
        return x + 0.3 * self.mlp(self.norm2(x)), None


class Sandwich(Block):
    """Norms behind the branches too, as Gemma 2; the second mixes the branch, the first the stream."""

    def forward(self, x, scale=None):
        return x + self.norm2(self.mlp(self.norm1(x))) + self.mixer(x.detach())[0] * 0


class Parallel(Block):
    def forward(self, x):
        y = self.norm1(x)
        return x + self.mixer(y)[0] + self.mlp(y)


class Direct(Block):
    """The mixer reads the stream."""

    def forward(self, x):
        x = x + self.mixer(x)[0]
        return x + self.mlp(self.norm2(x))


class Post(Block):
    """A norm reads the sum, and nothing else does: what follows is no stream."""

    def forward(self, x):
        x = self.norm1(x + self.mixer(x.clone())[0])
        return self.norm2(x + self.mlp(x))


class Asking(Block):
    def forward(self, x):
        return x + self.mlp(self.norm1(x)) if isinstance(x, Tensor) else x


class Dropping(Block):
    def forward(self, x):
        x = x + F.dropout(self.mixer(self.norm1(x))[0], 0.5, self.training)
        return x + self.mlp(self.norm2(x))


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, dy):
        return dy * 3


TRIPLED = Tripled.apply


class Applying(Block):
    """A function that takes no stream for a tensor: its result has no gradient."""

    def forward(self, x):
        x = x + self.mixer(self.norm1(x))[0]
        return x + TRIPLED(x) + self.mlp(self.norm2(x))


class Recomputing(Block):
    """Reentrant recomputation, off while the forward is tried."""

    recomputes = False

    def forward(self, x):
        return self.through(x + self.mixer(self.norm1(x))[0])

    def through(self, x):
        return x + (checkpoint(self.part, x, use_reentrant=True) if self.recomputes else self.part(x))

    def part(self, x):
        return self.mlp(self.norm2(x))


class Keeping(Block):
    def forward(self, x):
        self.last = x + self.mixer(self.norm1(x))[0]
        return self.last + self.mlp(self.norm2(self.last))


class Logging(Block):
    """The first to read a sum takes no gradient."""

    def forward(self, x):
        x = x + self.mixer(self.norm1(x))[0]
        with torch.no_grad():
            self.size = float(x.abs().mean())
            self.ignored = float(self.norm2(x).sum())
        return x + self.mlp(self.norm2(x))


class LoggingInference(Block):
    def forward(self, x):
        x = x + self.mixer(self.norm1(x))[0]
        with torch.inference_mode():
            self.size = float(x.abs().mean())
        return x + self.mlp(self.norm2(x))


class Stopping(Block):
    """A sum without a gradient, which a norm reads with one."""

    def forward(self, x):
        y = self.mixer(self.norm1(x))[0]
        with torch.no_grad():
            z = x + y
        return y + self.norm2(z)


class Writing(Block):
    """A summand is another thing after the sum."""

    def forward(self, x, factor=None):
        y = self.mixer(self.norm1(x))[0]
        x = x + y
        if factor is not None:
            y.mul_(factor)
        return x + self.mlp(self.norm2(x))


class Sums(TorchDispatchMode):
    """Counts additions of matrices in the shape of the stream."""

    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_sum = func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_)
        self.count["sums"] += is_sum and isinstance(result, Tensor) and result.shape[1:] == (5, WIDTH)
        return result


@pytest.fixture(autouse=True)
def gains(monkeypatch):
    """Let norms gain on a CPU, by reference kernels."""
    for module in (norm, residual):
        monkeypatch.setattr(module, "gains_by_kernels", lambda device: True)


def block(kind=Block, dtype=torch.float32, **options) -> nn.Module:
    torch.manual_seed(0)
    made = kind(**options).to(dtype)
    for name in NORMS:
        norm.adopt(made.get_submodule(name), ROW)
    return made


def inputs(dtype=torch.float32) -> Tensor:
    return torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def results(module, x, *args, **kwargs) -> tuple[list[Tensor], int]:
    """Return the result and all gradients, and the number of sums."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    torch.manual_seed(2)
    with Sums() as sums:
        y = module(x, *args, **kwargs)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(torch.ones_like(y).cumsum(-1) / 7)
    assert type(y) is Tensor
    return [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)], sums.count["sums"]


def assert_equal(first, second):
    assert len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_a_block_has_the_same_bits_in_a_fifth_of_the_sums(dtype, centred):
    module = block(dtype=dtype, centred=centred)
    assert norms_of_stream(module, NORMS) == NORMS
    want, before = results(module, inputs(dtype), scale=0.5)
    adopt(module)
    got, after = results(module, inputs(dtype), scale=0.5)
    assert_equal(got, want)
    assert (before, after) == (4, 1)  # of two sums and the gradients of each; the last sum is left
    assert module.mixer.seen is Tensor


@pytest.mark.parametrize(
    ("kind", "read", "sums"),
    [(Scaled, NORMS, (4, 1)), (Parallel, ("norm1",), (4, 3)), (Dropping, NORMS, (4, 1)), (Post, ("norm1",), (4, 3))],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_blocks(kind, read, sums):
    module = block(kind)
    assert norms_of_stream(module, NORMS) == read
    want, before = results(module, inputs())
    adopt(module)
    got, after = results(module, inputs())
    assert_equal(got, want)
    assert (before, after) == sums


@pytest.mark.parametrize("kind", [Direct, Asking, Mixer, MLP, Applying, Recomputing, Keeping])
def test_blocks_that_take_no_stream(kind):
    module = block(kind) if issubclass(kind, Block) else kind()
    assert norms_of_stream(module, NORMS if issubclass(kind, Block) else ()) == ()
    patched = block()
    patched.forward = lambda x: x
    assert norms_of_stream(patched, NORMS) == ()


def test_a_stream_that_something_else_reads_too_is_its_tensor():
    module = block(Sandwich)
    want, _ = results(module, inputs())
    adopt(module)
    assert_equal(results(module, inputs())[0], want)


@pytest.mark.parametrize("kind", [Logging, LoggingInference, Stopping])
def test_a_sum_has_the_gradient_that_it_has_where_it_is_written(kind):
    module = block(kind)
    want, _ = results(module, inputs())
    adopt(module)
    assert module._takes(inputs())
    assert_equal(results(module, inputs())[0], want)


def test_a_write_to_a_summand_before_the_sum_is_computed_is_refused():
    module = block(Writing)
    want, _ = results(module, inputs())
    adopt(module)
    assert_equal(results(module, inputs())[0], want)
    with pytest.raises(UnsupportedError, match="wrote to a tensor"):
        module(inputs(), 2.0)


@pytest.mark.parametrize("wide", [False, True], ids=["bf16 stream", "fp32 stream"])
def test_under_autocast(wide):
    module = block(dtype=torch.float32 if wide else torch.bfloat16)
    for name in NORMS:
        module.get_submodule(name).ignores_autocast = True
    x = inputs(torch.float32 if wide else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        want, before = results(module, x)
        adopt(module)
        got, after = results(module, x)
    assert_equal(got, want)
    assert after < before and got[0].dtype == x.dtype


def test_codes_go_with_the_norm_of_a_sum(monkeypatch):
    module, found = block(), []
    monkeypatch.setattr(MLP, "forward", lambda self, x: found.append(attached_codes(x, ROW)) or x * 2)
    adopt(module)
    module(inputs())
    assert found[0] is not None and found[0].codes.shape == (20, WIDTH)


def test_without_gradients_and_recomputed():
    module, x = block(), inputs()
    want, _ = results(module, x)
    adopt(module)
    with torch.no_grad(), Sums() as sums:
        assert torch.equal(module(x), want[0]) and sums.count["sums"] == 1
    for reentrant in (False, True):
        assert_equal(results(lambda_module(module, reentrant), x)[0], want)


def lambda_module(module, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, x):
            return checkpoint(self.module, x, use_reentrant=reentrant)

    return Checkpointed()


def test_norms_that_keep_their_input_in_fp8():
    module = block()
    for name in NORMS:
        module.get_submodule(name).input_format = "fp8"
    want, before = results(module, inputs())
    adopt(module)
    got, after = results(module, inputs())
    assert_equal(got, want)
    assert after < before


def test_it_runs_as_it_is_where_something_would_see_the_stream(monkeypatch):
    module, x = block(), inputs()
    want, _ = results(module, x)
    adopt(module)
    seen = []
    handle = module.norm2.register_forward_pre_hook(lambda _, args: seen.append(type(args[0])))
    got, sums = results(module, x)
    assert_equal(got, want)
    assert sums == 4 and seen == [Tensor]
    handle.remove()
    module.enabled = False
    assert results(module, x)[1] == 4
    module.enabled = True
    with monkeypatch.context() as patch:
        patch.setattr(Block, "forward", lambda self, x: isinstance(x, Tensor))
        assert module(x) is True
    assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(x), want[0])
    for name in NORMS:
        module.get_submodule(name).release()
    assert not module._takes(x)


def test_norms_whose_kernels_do_not_take_the_stream_add_nothing_of_their_own():
    module, x = block(), inputs()
    adopt(module)
    wide = inputs(torch.float64)
    module.double()
    want = copy.deepcopy(module)
    want.enabled = False
    assert_equal(results(module, wide)[0], results(want, wide)[0])
    module.float()
    module.norm2.bfloat16()  # its parent decides of the dtype
    want = copy.deepcopy(module)
    want.enabled = False
    assert_equal([module(x)], [want(x)])


def test_copies_files_and_release():
    module, x = block(), inputs()
    want, _ = results(module, x)
    adopt(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    type(module).tried_code = None  # as in another process
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        got, sums = results(other, x)
        assert isinstance(other, ResidualBlock) and sums == 1
        assert_equal(got, want)
    module.release()
    assert type(module) is Block and isinstance(module.norm1, Norm)
    assert results(module, x)[1] == 4


def test_a_second_order_gradient_is_refused_as_by_norms_alone():
    module, x = block(), inputs()
    adopt(module)
    with pytest.raises(Exception, match="second"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)[0].sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_has_the_same_bits(dtype, monkeypatch):
    monkeypatch.undo()
    module = block(dtype=dtype).cuda()
    x = inputs(dtype).detach().cuda()
    want, before = results(module, x)
    adopt(module)
    got, after = results(module, x)
    assert_equal(got, want)
    assert (before, after) == (4, 1)
    for _ in range(4):  # from the third on by recorded launches, which a dispatch mode as above prevents
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        y = module(leaf)
        y.backward(torch.ones_like(y).cumsum(-1) / 7)
        assert_equal([y.detach(), leaf.grad, *(p.grad for p in module.parameters())], want)
