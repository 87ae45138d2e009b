"""Norms that change their class: what they compute, what they hand on, what they leave to their parent.

On a CPU nothing is gained by them, so tests say that it is (`gains`), and the reference kernels run.
"""

import copy
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import kernels
from octavo.kernels.norm import normalise
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.runtime import ledger
from octavo.nn import attached_codes as attached_codes_module
from octavo.nn import norm
from octavo.nn.adopted import Adopted
from octavo.nn.attached_codes import attached_codes, attached_input
from octavo.nn.norm import Norm, adopt, adopts
from octavo.nn.telemetry import Telemetry
from octavo.numerics import E4M3, PER_ROW, dequantize, quantize, sqnr_db
from octavo.recipes.presets import PRESETS

ROW = QuantSpec("e4m3", "row", "power_of_two")
BLOCK = QuantSpec("e4m3", "1x128", "power_of_two")
ROTATED = QuantSpec("int8", "row", "float32", rotation=256)
WIDTH = 48
ON_CPU = not torch.cuda.is_available()


class LlamaRMSNorm(nn.Module):
    """As Hugging Face has it."""

    def __init__(self, width=WIDTH, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon)).to(dtype)


class T5LayerNorm(LlamaRMSNorm):
    """An RMS norm by another name; 16-bit weights decide the dtype."""

    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class Own(nn.RMSNorm):
    """A user's subclass that adds nothing to the arithmetic."""


class GemmaRMSNorm(nn.Module):
    """Gemma's and Qwen3-Next's: 1 + weight, in FP32, and one rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(WIDTH)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1 + self.weight.to(wide.dtype))).type_as(x)


class TimmLayerNorm(nn.LayerNorm):
    """A subclass of `nn.LayerNorm` with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


@pytest.fixture
def gains(monkeypatch):
    """Say that the kernels gain something here."""
    monkeypatch.setattr(norm, "gains_by_kernels", lambda device: True)


def modules() -> dict[str, nn.Module]:
    return {
        "rms": nn.RMSNorm(WIDTH, eps=1e-5),
        "rms without eps": nn.RMSNorm(WIDTH),
        "rms without weight": nn.RMSNorm(WIDTH, eps=1e-5, elementwise_affine=False),
        "layer": nn.LayerNorm(WIDTH),
        "layer without bias": nn.LayerNorm(WIDTH, bias=False),
        "layer without weight": nn.LayerNorm(WIDTH, elementwise_affine=False),
        "llama": LlamaRMSNorm(),
        "t5": T5LayerNorm(),
        "own": Own(WIDTH, eps=1e-5),
        "gemma": GemmaRMSNorm(),
        "timm": TimmLayerNorm(WIDTH, eps=1e-6),
    }


every_module = pytest.mark.parametrize("kind", modules())


def drawn(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    module = modules()[kind]
    for parameter in module.parameters():
        nn.init.normal_(parameter, 1.0, 0.5)
    return module.to(dtype)


def small(*shape: int) -> Tensor:
    """Values among which the choice of eps shows."""
    return torch.randn(shape) * torch.tensor([1.0, 0.01]).repeat(shape[-2] // 2 + 1)[: shape[-2], None]


# --- what it computes -----------------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@every_module
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("target", [None, ROW, BLOCK], ids=str)
@pytest.mark.parametrize("shape", [(6, WIDTH), (2, 3, WIDTH)], ids=str)
def test_values_and_gradients_are_the_parents(kind, dtype, target, shape, gains):
    module, x, dy = drawn(kind, dtype), small(*shape).to(dtype), torch.randn(shape).to(dtype)
    parent = copy.deepcopy(module)
    adopt(module, target)
    results = []
    for run in (parent, module):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.backward(dy)
        results.append((y.detach(), leaf.grad, *(p.grad for p in run.parameters())))
    for theirs, mine in zip(*results, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}[dtype]
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


@every_module
def test_gradients_are_those_of_float64(kind, gains):
    module, x, dy = drawn(kind), torch.randn(7, WIDTH), torch.randn(7, WIDTH)
    exact = copy.deepcopy(module).double()
    adopt(module, ROW)
    leaf, leaf64 = x.clone().requires_grad_(), x.double().requires_grad_()
    module(leaf).backward(dy)
    want64 = exact(leaf64) if not isinstance(exact, LlamaRMSNorm) else F.rms_norm(leaf64, (WIDTH,), exact.weight, 1e-6)
    want64.backward(dy.double())
    torch.testing.assert_close(leaf.grad.double(), leaf64.grad, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(module.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


def test_a_result_can_be_changed_in_place(gains):
    module, x = drawn("rms"), torch.randn(2, 3, WIDTH, requires_grad=True)
    adopt(module, ROW)
    y = module(x)
    y.mul_(2)
    assert attached_codes(y, ROW) is None
    y.sum().backward()
    other = torch.empty_like(x).copy_(x.detach()).requires_grad_()
    module.release()
    (2 * module(other)).sum().backward()
    torch.testing.assert_close(x.grad, other.grad)


# --- what it hands on -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [ROW, BLOCK], ids=str)
@pytest.mark.parametrize("kind", ["rms", "layer", "llama"])
def test_the_codes_are_the_kernels_own(kind, target, gains):
    module, x = drawn(kind, torch.bfloat16), torch.randn(2, 5, WIDTH).bfloat16()
    adopt(module, target)
    y, flat = module(x), x.reshape(10, WIDTH)
    if kind == "layer":
        want = normalise(flat, module.weight, module.bias, module.eps, centred=True, target=target)
    else:
        want = normalise(flat, module.weight, None, norm._eps_of(module), target=target)
    got = attached_codes(y, target)
    assert got.granularity == target.tile
    assert torch.equal(got.codes.view(torch.uint8), want.quantized.codes.view(torch.uint8))
    assert torch.equal(got.scale, want.quantized.scale)
    assert torch.equal(y, want.y.view_as(x))
    assert attached_codes(y, ROW if target == BLOCK else BLOCK) is None


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["rms", "rms without weight", "layer", "llama", "gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_sets_of_codes_are_those_of_the_values_before_they_are_rounded(kind, dtype, gains):
    module, x = drawn(kind, dtype), torch.randn(2, 5, WIDTH).to(dtype)
    exact = copy.deepcopy(module).float()
    adopt(module, ROTATED, second=ROW)
    y = module(x.requires_grad_())
    adopt(exact, None)
    values = exact(x.detach().float()).reshape(10, WIDTH)
    for target in (ROTATED, ROW):
        got, want = attached_codes(y, target), kernels.quantize(values, *target[:4], target.rotation)
        assert got.granularity == want.granularity and torch.equal(got.scale, want.scale)
        assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))


def test_codes_for_wgrad_are_written_where_it_is_likely_to_run(gains):
    module, x = drawn("rms"), torch.randn(4, WIDTH, requires_grad=True)
    adopt(module, ROTATED, second=ROW)
    with torch.no_grad():
        y = module(x)
    assert attached_codes(y, ROTATED) is not None and attached_codes(y, ROW) is None
    assert attached_codes(module(x), ROW) is not None
    module.requires_grad_(False)
    y = module(x)
    assert attached_codes(y, ROTATED) is not None and attached_codes(y, ROW) is None
    y.data.mul_(2)
    assert attached_codes(y, ROTATED) is None


def test_the_codes_pass_through_a_sequence_and_hooks(gains):
    model = nn.Sequential(drawn("rms"), nn.Identity())
    adopt(model[0], ROW)
    seen = []
    model[0].register_forward_hook(lambda module, args, y: seen.append(y))
    y = model(torch.randn(4, WIDTH))
    assert seen[0] is y and attached_codes(y, ROW) is not None


def test_no_gradients_are_needed_to_hand_codes_on(gains):
    module = drawn("llama")
    adopt(module, ROW)
    with torch.no_grad():
        y = module(torch.randn(4, WIDTH))
    assert attached_codes(y, ROW) is not None and not y.requires_grad
    with torch.inference_mode():
        assert attached_codes(module(torch.randn(4, WIDTH)), ROW) is not None


def test_a_target_that_needs_all_of_y_is_left_to_the_reader(gains):
    module, target = drawn("rms"), QuantSpec("e4m3", "tensor", "float32")
    adopt(module, target)
    assert module.target is None
    assert attached_codes(module(torch.randn(4, WIDTH)), target) is None


@pytest.mark.parametrize("write", [lambda y: y.data.mul_(3), lambda y: y.numpy().fill(2), lambda y: y.data_ptr()])
def test_its_reader_does_not_use_codes_of_a_result_that_may_have_been_written_to(write, gains):
    module, layer = drawn("rms"), octavo.nn.Linear(WIDTH, 32, recipe="folded")
    adopt(module, ROW)
    with torch.no_grad():
        y = module(torch.randn(4, WIDTH))
        write(y)
        assert attached_codes(y, ROW) is None and torch.equal(layer(y), layer(y.clone()))


def test_all_readers_use_the_same_codes(gains):
    module = drawn("rms", torch.bfloat16)
    adopt(module, ROW)
    layers = [octavo.nn.Linear(WIDTH, 32, recipe="folded").bfloat16() for _ in range(3)]
    y = module(torch.randn(4, WIDTH).bfloat16().requires_grad_())
    for layer in layers:
        y.data_ptr()  # as a kernel of a layer
        attached_codes_module.renew(y)
        codes = attached_codes(y, ROW)
        layer(y).sum().backward(retain_graph=True)
        assert codes is not None and attached_codes(y, ROW) is codes


# --- what it leaves to its parent -----------------------------------------------------------------------------------


def assert_parents(module: nn.Module, x: Tensor) -> None:
    """The adopted module gives its parent's result, bit for bit, and no codes."""
    parent = copy.deepcopy(module)
    parent.release()
    y, want = module(x), parent(x)
    assert y.dtype == want.dtype and torch.equal(y, want)
    assert attached_codes(y, ROW) is None


@pytest.mark.skipif(not ON_CPU, reason="is about a CPU")
def test_everything_on_a_cpu():
    for kind in modules():
        module = drawn(kind)
        adopt(module, ROW)
        assert_parents(module, torch.randn(4, WIDTH))


@pytest.mark.parametrize("kind", ["rms", "layer", "llama"])
def test_what_is_switched_off(kind, gains):
    module = drawn(kind)
    adopt(module, ROW)
    module.enabled = False
    assert_parents(module, torch.randn(4, WIDTH))
    module.enabled = True
    assert attached_codes(module(torch.randn(4, WIDTH)), ROW) is not None


def test_more_than_one_dimension(gains):
    module = nn.LayerNorm((3, WIDTH))
    adopt(module, ROW)
    assert_parents(module, torch.randn(4, 3, WIDTH))


def test_dtypes_that_differ(gains):
    module = drawn("llama")
    adopt(module, ROW)
    assert_parents(module, torch.randn(4, WIDTH).bfloat16())  # which makes it FP32
    assert_parents(drawn_and_adopted("rms", torch.float64), torch.randn(4, WIDTH).double())


def drawn_and_adopted(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    module = drawn(kind, dtype)
    adopt(module, ROW)
    return module


@pytest.mark.parametrize("shape", [(0, 3, WIDTH), (2, 3, 0), (0,)], ids=str)
def test_nothing_at_all(shape, gains):
    module = nn.RMSNorm(shape[-1])
    adopt(module, ROW)
    assert module(torch.randn(shape)).shape == shape


def test_a_single_row(gains):
    module, x = drawn_and_adopted("rms"), torch.randn(WIDTH)
    y = module(x)
    assert y.shape == (WIDTH,) and torch.equal(y, module(x[None])[0])


def test_a_reader_that_sends_no_gradient_back(gains):
    class Silent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    x = torch.randn(4, WIDTH, requires_grad=True)
    Silent.apply(drawn_and_adopted("rms")(x)).sum().backward()
    assert x.grad is None


def test_tensors_of_another_class(gains):
    class Other(torch.Tensor):
        pass

    y = drawn_and_adopted("rms")(torch.randn(4, WIDTH).as_subclass(Other))
    assert type(y) is Other and attached_codes(y, ROW) is None


@pytest.mark.parametrize("kind", ["rms", "layer", "llama"])
def test_autocast_gives_the_dtype_that_the_parent_gives(kind, gains):
    module = drawn_and_adopted(kind)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(torch.randn(4, WIDTH))
        assert y.dtype == torch.float32 and attached_codes(y, ROW) is not None
        module.to(torch.bfloat16)
        x = torch.randn(4, WIDTH).bfloat16()
        if kind == "llama":  # its own operations are on none of autocast's lists
            assert module(x).dtype == torch.bfloat16 and attached_codes(module(x), ROW) is not None
        else:
            assert_parents(module, x)


def test_arguments_by_name_and_more_of_them(gains):
    class Gated(LlamaRMSNorm):
        def forward(self, hidden_states, gate=None):
            y = super().forward(hidden_states)
            return y if gate is None else y * gate

    module, x = Gated(), torch.randn(4, WIDTH)
    assert adopts(module)
    adopt(module, ROW)
    assert torch.equal(module(x, 2 * x), 2 * x * module(hidden_states=x))
    assert attached_codes(module(x), ROW) is not None


@pytest.mark.parametrize("kind", ["rms", "layer", "llama"])
def test_compiled_code(kind, monkeypatch):
    monkeypatch.setattr(norm, "gains_by_kernels", lambda device: pytest.fail("compiled code asked whether it gains"))
    module = drawn(kind)
    parent = copy.deepcopy(module)
    adopt(module, ROW)
    x = torch.randn(4, WIDTH)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    y = compiled(x)
    torch.testing.assert_close(y, parent(x))
    assert attached_codes(y, ROW) is None


# --- what it adopts -------------------------------------------------------------------------------------------------


@every_module
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adopted(kind, dtype):
    assert adopts(drawn(kind, dtype))


def test_probing_leaves_no_trace():
    module, state = drawn("llama"), torch.get_rng_state()
    module.register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    weight = module.weight.detach().clone()
    assert adopts(module)
    assert torch.equal(module.weight, weight) and torch.equal(torch.get_rng_state(), state)
    with torch.device("meta"):
        assert adopts(LlamaRMSNorm()) and not adopts(TwoMore())


class Llama(LlamaRMSNorm):
    """What the refused ones are made of: a sound norm with one thing changed."""

    def normed(self, x, dim=-1):
        return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + self.variance_epsilon)


class TwoMore(Llama):
    def forward(self, x):
        return (2 + self.weight) * self.normed(x)


class HalfCentred(Llama):
    def forward(self, x):
        return self.weight * self.normed(x - 0.5 * x.mean(-1, keepdim=True))


class ScaledLayerNorm(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x):
        return super().forward(x) * 1.01


class EpsOutside(Llama):
    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class AlongAnother(Llama):
    def forward(self, x):
        return self.weight * self.normed(x, dim=1)


class AlwaysFP32(Llama):
    def forward(self, x):
        return self.weight.float() * self.normed(x.float())


class Dropping(Llama):
    def forward(self, x):
        return F.dropout(self.weight * self.normed(x), 0.5)


class TwoResults(Llama):
    def forward(self, x):
        return self.weight * self.normed(x), x


class TwoInputs(Llama):
    def forward(self, x, y):
        return self.weight * self.normed(x + y)


class WithBias(Llama):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return self.weight * self.normed(x) + self.bias


class WithChild(Llama):
    def __init__(self):
        super().__init__()
        self.child = nn.Identity()

    def forward(self, x):
        return self.weight * self.normed(x)


class WithoutEps(Llama):
    def __init__(self):
        super().__init__()
        self.hidden_eps = self.variance_epsilon
        del self.variance_epsilon

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.hidden_eps)


class DroppingInTraining(Llama):
    def forward(self, x):
        return F.dropout(self.weight * self.normed(x), 0.01, self.training)


class Counting(Llama):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.weight * self.normed(x)


class StoppingTheStatistics(Llama):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class OtherWithoutBatch(Llama):
    def forward(self, x):
        return self.weight * self.normed(x) * (1 if x.dim() > 2 else 2)


class StopsAtNaN(Llama):
    def forward(self, x):
        assert not x.isnan().any()
        return self.weight * self.normed(x)


class ChangesItsInput(Llama):
    def forward(self, x):
        with torch.no_grad():
            x.mul_(2).div_(2)
        return self.weight * self.normed(x)


NORMS = {"calls": 0}


class CountingInAGlobal(Llama):
    def forward(self, x):
        NORMS["calls"] += 1
        return self.weight * self.normed(x)


REFUSED = [TwoMore, HalfCentred, ScaledLayerNorm, EpsOutside, AlongAnother, AlwaysFP32, Dropping, TwoResults, TwoInputs]
REFUSED += [WithBias, WithChild, WithoutEps, DroppingInTraining, Counting, StoppingTheStatistics]
REFUSED += [OtherWithoutBatch, StopsAtNaN, ChangesItsInput, CountingInAGlobal]


@pytest.mark.parametrize("cls", REFUSED)
def test_not_adopted(cls):
    assert not adopts(cls().eval() if cls is not Dropping else cls())


def test_not_adopted_either():
    assert not adopts(nn.Linear(4, 4, bias=False))
    assert not adopts(nn.GroupNorm(2, 4))
    assert not adopts(nn.Embedding(4, 4))
    assert not adopts(nn.PReLU(4))
    assert not adopts(nn.LayerNorm((3, 4)))
    patched = LlamaRMSNorm()
    patched.forward = lambda x: x
    assert not adopts(patched)


@pytest.mark.parametrize("eps", [1, np.float32(1e-2), np.float64(1e-2)], ids=str)
@pytest.mark.parametrize("make", [nn.RMSNorm, nn.LayerNorm, Own, LlamaRMSNorm])
def test_an_epsilon_of_any_type_is_the_modules_own(make, eps, gains):
    module = make(WIDTH, eps=eps)
    assert adopts(module)
    x = torch.randn(5, WIDTH)
    expected = module(x)
    adopt(module, None)
    torch.testing.assert_close(module(x), expected)


def test_an_epsilon_that_is_no_number_is_left_alone():
    assert not any(adopts(make(WIDTH, eps=torch.tensor(0.5))) for make in (nn.RMSNorm, nn.LayerNorm, LlamaRMSNorm))


class Scaled(LlamaRMSNorm):
    """An attribute says whether it is an RMS norm."""

    def __init__(self):
        super().__init__()
        self.offset = 0.0

    def forward(self, x):
        return super().forward(x) + self.offset


@pytest.mark.parametrize("input_format", ["bf16", "fp8"])
def test_an_attribute_changed_later_is_followed(input_format, gains):
    module, x = Scaled(), torch.randn(5, WIDTH, requires_grad=True)
    assert adopts(module)
    adopt(module, ROW, input_format)
    plain = module(x).detach()
    module.offset = 1.0
    torch.testing.assert_close(module(x).detach(), plain + 1)
    assert not adopts(module)
    module.offset = 0.0
    assert adopts(module) and torch.equal(module(x), plain)


# --- the change of class --------------------------------------------------------------------------------------------


@every_module
def test_adopt_and_release_change_nothing_but_the_class(kind):
    module = drawn(kind)
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    cls, parameters, state = type(module), list(module.parameters()), set(module.state_dict())
    attributes = set(vars(module))
    adopt(module, ROW)
    assert isinstance(module, Norm) and isinstance(module, cls) and adopts(module)
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert set(module.state_dict()) == state and module.target == ROW
    module(torch.randn(2, WIDTH))
    assert calls == [1]
    adopt(module, BLOCK)
    assert module.target == BLOCK and isinstance(module, cls)
    module.release()
    assert type(module) is cls and set(vars(module)) == attributes
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))


def test_a_class_is_made_once():
    rms, layer = nn.RMSNorm(4), nn.LayerNorm(4)
    adopt(rms, None)
    adopt(layer, None)
    assert (
        type(rms).__mro__[:2] == (type(rms), Norm)
        and issubclass(Norm, Adopted)
        and not rms.is_centred
        and layer.is_centred
    )
    first, second = LlamaRMSNorm(), LlamaRMSNorm()
    adopt(first, None)
    adopt(second, None)
    assert type(first) is type(second)


@every_module
def test_copies_and_files(kind):
    module = drawn_and_adopted(kind)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    x = torch.randn(3, WIDTH)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert type(other) is type(module) and other.target == ROW and other.enabled
        assert torch.equal(other(x), module(x))
        if list(module.parameters()):
            assert other.weight is not module.weight


def test_what_print_shows():
    module = drawn_and_adopted("rms")
    assert "codes=e4m3 row" in repr(module) and "disabled" not in repr(module)
    module.enabled = False
    assert "disabled" in repr(module)


def test_a_norm_of_an_older_file_knows_no_second_codes(gains):
    """Its reader makes those that it lacks, as it did then."""
    layer = octavo.nn.Linear(WIDTH, 32, recipe="rotated")
    module = drawn("rms")
    adopt(module, layer.recipe.plan.x, second=layer.recipe.plan.x_second)
    x = torch.randn(4, WIDTH)
    layer(module(x)).sum().backward()
    new = layer.weight.grad.clone()
    del module.__dict__["second"]
    y = module(x)
    assert attached_codes(y, layer.recipe.plan.x) is not None and attached_codes(y, layer.recipe.plan.x_second) is None
    layer.zero_grad()
    layer(y).sum().backward()
    assert torch.equal(layer.weight.grad, new)  # of FP32 values, which are not rounded before they are quantised


# --- what its readers make of both sets -----------------------------------------------------------------------------


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(*shape, bias=False) for shape in ((width, 96), (width, 96), (96, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Layers that share a norm's result, and an MLP behind another norm."""

    def __init__(self, width: int = 64, norm: type = nn.RMSNorm):
        super().__init__()
        self.first, self.second = norm(width, eps=1e-5), norm(width, eps=1e-5)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.mlp = FeedForward(width)

    def forward(self, x):
        y = self.first(x)
        x = x + self.out(self.q(y) * torch.sigmoid(self.k(y)) + self.v(y))
        return x + self.mlp(self.second(x))


def stepped(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Return the result and all gradients of a step."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.backward(dy)
    return [y.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters() if p.requires_grad)]


def no_codes(monkeypatch) -> None:
    """Let norms hand on nothing: readers quantise by themselves."""
    monkeypatch.setattr(norm, "attach_codes", lambda *_: None)


@pytest.fixture
def reads(monkeypatch):
    """Count the passes that quantise inputs of layers to two sets."""
    made, own = [], kernels.quantize_rows_twice

    def counted(matrices, first, second, keeps_codes, weights=False):
        made.extend([] if weights else [tuple(matrices[0].shape)])
        return own(matrices, first, second, keeps_codes, weights)

    monkeypatch.setattr(kernels, "quantize_rows_twice", counted)
    return made


def converted(recipe="rotated", **options) -> nn.Module:
    torch.manual_seed(0)
    model = Block(**options)
    for each in (model.first, model.second):
        nn.init.normal_(each.weight, 1.0, 0.3)
    octavo.convert(model, recipe, policy=octavo.Policy(min_gain=0.0))
    return model


@pytest.mark.covering(1)
@pytest.mark.parametrize("fn", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("recipe", [name for name in PRESETS if name not in ("bf16", "static")])
def test_layers_compute_the_same_bits_from_a_norms_codes_as_from_its_values(recipe, fn, gains, monkeypatch):
    model, x, dy = converted(recipe, norm=fn), torch.randn(24, 64), torch.randn(24, 64)
    mine = stepped(model, x, dy)
    with torch.no_grad():
        evaluated = model(x)
    no_codes(monkeypatch)
    for got, want in zip(mine, stepped(model, x, dy), strict=True):
        assert torch.equal(got, want)  # FP32: values that are quantised before they are rounded are the same
    with torch.no_grad():
        assert torch.equal(evaluated, model(x))


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("recipe", ["folded", "rotated"])
def test_an_evaluation_reads_the_codes_that_training_does(recipe, is_frozen, gains, reads):
    """BF16: codes of y before it is rounded are others than codes of y."""
    model, x = converted(recipe).bfloat16(), torch.randn(24, 64).bfloat16()
    for each in (model.first, model.second):
        each.weight.requires_grad_(not is_frozen)
    trained = model(x)
    reads.clear()
    with torch.no_grad():
        assert torch.equal(model(x), trained)
    assert not reads  # nor does it make codes for wgrad
    rerun = checkpoint(model, x.requires_grad_(), use_reentrant=True)
    assert torch.equal(rerun, trained)


@pytest.mark.parametrize("fn", [nn.RMSNorm, nn.LayerNorm])
def test_a_norms_result_is_not_read_again_by_layers_that_rotate(fn, gains, reads, monkeypatch):
    model, x = converted(norm=fn), torch.randn(24, 64)
    stepped(model, x, x)
    assert len(reads) == 1  # by `out`, whose input no norm computes
    reads.clear()
    no_codes(monkeypatch)
    stepped(model, x, x)
    assert len(reads) == 3


def test_layers_keep_what_they_kept_before(gains, monkeypatch):
    model, x = converted(), torch.randn(24, 64)

    def kept():
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            model(x.clone().requires_grad_())
        return sorted(sizes)

    before = kept()
    no_codes(monkeypatch)
    assert before == kept()


def other_recipe(model):
    octavo.convert(model, "rotated", policy=octavo.Policy(min_gain=0.0, keep=("k",)))


def another_format(model):
    recipe = octavo.recipes.load("rotated")
    own = {"k": octavo.recipes.load("folded"), "mlp.up": octavo.recipes.load("rotated_fast")}
    octavo.convert(model, replace(recipe, modules=own), policy=octavo.Policy(min_gain=0.0))


def disabled(model):
    model.k.enabled = model.mlp.gate.enabled = False


def frozen(model):
    for each in (model.q, model.k, model.v, model.mlp.gate):
        each.weight.requires_grad_(False)


def frozen_norms(model):
    for each in (model.first, model.second):
        each.weight.requires_grad_(False)


def hooked(model):
    model.mlp.up.register_forward_hook(lambda module, args, y: None)
    model.k.register_forward_pre_hook(lambda module, args: None)


def requantised(model):
    octavo.convert(
        model, "rotated", policy=octavo.Policy(min_gain=0.0, requantise=("q", "k", "v", "mlp.gate", "mlp.up"))
    )


def low_memory(model):
    octavo.convert(model, "rotated", policy=octavo.Policy(min_gain=0.0, memory="low"))


def unfused(model):
    octavo.convert(model, "rotated", policy=octavo.Policy(min_gain=0.0, fuse=False))


def observed_by_telemetry(model):
    model.__dict__["telemetry"] = Telemetry(model, every=1)


CHANGES = [
    other_recipe, another_format, disabled, frozen, frozen_norms, hooked, requantised, low_memory, unfused,
    observed_by_telemetry,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_block_computes_the_same_bits_from_codes_as_from_values(change, gains, monkeypatch):
    model, x, dy = converted(), torch.randn(24, 64), torch.randn(24, 64)
    change(model)
    mine = stepped(model, x, dy)
    no_codes(monkeypatch)
    for got, want in zip(mine, stepped(model, x, dy), strict=True):
        assert torch.equal(got, want)


def test_a_recomputed_block_makes_both_sets_again(gains):
    model, x, dy = converted(), torch.randn(24, 64), torch.randn(24, 64)
    want = stepped(model, x, dy)
    for reentrant in (False, True):
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        y = checkpoint(model, leaf, use_reentrant=reentrant)
        y.backward(dy)
        got = [y.detach(), leaf.grad, *(p.grad for p in model.parameters())]
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("write", [lambda y: y.data.mul_(3), lambda y: y.mul_(3), lambda y: y.detach().numpy().fill(2)])
def test_no_set_is_read_after_a_write(write, gains):
    module, layer = drawn("rms"), octavo.nn.Linear(WIDTH, 32, recipe="rotated")
    adopt(module, layer.recipe.plan.x, second=layer.recipe.plan.x_second)
    y = module(torch.randn(4, WIDTH))
    assert None not in attached_input(y, layer.recipe)
    write(y)
    z = layer(y)
    z.sum().backward()
    other = copy.deepcopy(layer)
    other.zero_grad()
    want = other(y.detach().clone())
    want.sum().backward()
    assert torch.equal(z, want) and torch.equal(layer.weight.grad, other.weight.grad)


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fn", [nn.RMSNorm, nn.LayerNorm])
def test_on_a_gpu_layers_that_rotate_read_the_codes_of_a_norm(fn, dtype, reads, monkeypatch):
    """Three steps: the first runs, the second is recorded, the third is a replay."""
    model = converted(width=512, norm=fn).to("cuda", dtype)
    x, dy = (torch.randn(2, 96, 512, device="cuda", dtype=dtype) for _ in range(2))
    steps = [stepped(model, x, dy) for _ in range(3)]
    assert len(reads) <= len(steps)  # by `out` alone, until it is recorded
    for other in steps[1:]:
        assert all(map(torch.equal, steps[0], other))
    no_codes(monkeypatch)
    for got, want in zip(steps[0], stepped(model, x, dy), strict=True):
        if dtype == torch.float32:
            assert torch.equal(got, want)
        assert sqnr_db(want.double(), got.double()) > 25  # other codes where BF16's rounding decides


@pytest.mark.gpu
@every_module
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(kind, dtype):
    module, x = drawn(kind, dtype).cuda(), small(2, 65, WIDTH).to("cuda", dtype)
    parent = copy.deepcopy(module)
    adopt(module, ROW)
    dy = torch.randn_like(x)
    leaf, other = (x.clone().requires_grad_() for _ in range(2))
    with kernels.record() as ledger:
        y = module(leaf)
        y.backward(dy)
    want = parent(other)
    want.backward(dy)
    assert not ledger.fallbacks and attached_codes(y, ROW) is not None
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(y, want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(leaf.grad, other.grad, rtol=tolerance, atol=tolerance * float(other.grad.abs().max()))
    for mine, theirs in zip(module.parameters(), parent.parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, theirs.grad, rtol=tolerance, atol=tolerance * float(theirs.grad.abs().max())
        )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["rms", "layer", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_on_a_gpu(kind, dtype):
    module, x = drawn(kind, dtype).cuda(), torch.randn(4, WIDTH, device="cuda", dtype=dtype)
    parent = copy.deepcopy(module)
    adopt(module, ROW)
    with torch.autocast("cuda", torch.bfloat16):
        y, want = module(x), parent(x)
    assert y.dtype == want.dtype
    is_fused = dtype == torch.float32 or kind == "llama"  # a product less is rounded to 16 bits
    assert (attached_codes(y, ROW) is not None) == is_fused
    tolerance = 1e-5 if dtype == torch.float32 or not is_fused else 0.02
    torch.testing.assert_close(y, want, rtol=tolerance, atol=tolerance)


# --- what it keeps --------------------------------------------------------------------------------------------------


def kept_and_gradients(module: nn.Module, x: Tensor, dy: Tensor, run=None) -> tuple[int, list[Tensor]]:
    """The bytes saved for backward, without parameters, and y with every gradient."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    module.zero_grad()
    leaf = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = (module if run is None else run)(leaf)
    y.backward(dy)
    size = sum(t.untyped_storage().nbytes() for where, t in kept.items() if where not in own)
    return size, [y.detach(), leaf.grad, *(p.grad for p in module.parameters())]


@every_module
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_input_in_fp8(kind, dtype, gains):
    module, x, dy = drawn(kind, dtype), torch.randn(300, WIDTH).to(dtype), torch.randn(300, WIDTH).to(dtype)
    adopt(module, ROW)
    much, want = kept_and_gradients(module, x, dy)
    adopt(module, ROW, "fp8")
    little, got = kept_and_gradients(module, x, dy)
    assert much - little == 300 * (WIDTH * (dtype.itemsize - 1) - 4)
    assert torch.equal(got[0], want[0])
    assert sqnr_db(want[1], got[1]) > 35  # of dx one term of three sees it
    assert all(sqnr_db(a, b) > 25 for a, b in zip(want[2:], got[2:], strict=True))
    assert attached_codes(module(x), ROW) is not None
    module.release()
    assert not hasattr(module, "input_format")


@pytest.mark.parametrize("kind", ["rms without eps", "layer"])
def test_an_input_in_fp8_also_on_a_cpu_and_in_compiled_code(kind, monkeypatch):
    module, x, dy = drawn(kind, torch.bfloat16), torch.randn(40, WIDTH).bfloat16(), torch.randn(40, WIDTH).bfloat16()
    adopt(module, ROW, "fp8")
    assert "input_format=fp8" in repr(module)
    size, want = kept_and_gradients(module, x, dy)
    monkeypatch.setattr(norm, "gains_by_kernels", lambda device: pytest.fail("compiled code asked whether it gains"))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    compiled_size, got = kept_and_gradients(module, x, dy, compiled)
    statistics = 2 if kind == "layer" else 1
    assert size == compiled_size == 40 * (WIDTH + 4 + 4 * statistics)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_an_input_that_cannot_be_kept_in_fp8_is_written_down():
    module = drawn("llama")
    adopt(module, ROW, "fp8")
    with ledger.record() as record:
        module(torch.randn(4, WIDTH, requires_grad=True))
        assert record.fallbacks == []
        module(torch.randn(4, WIDTH).bfloat16())
    assert len(record.fallbacks) == 1 and "a norm kept its input as it is" in record.fallbacks[0]


def _compiled_step(model, x, dy):
    """Return what compiled code keeps for backward, in bytes without parameters, and all gradients."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = compiled(inputs)
    size = sum(t.untyped_storage().nbytes() for t in kept.values() if not isinstance(t, nn.Parameter))
    y.backward(dy)
    return size, [inputs.grad, *(parameter.grad for parameter in model.parameters())]


def _norm_and_reader(monkeypatch, shortest, recipe="folded"):
    """Return a norm and a layer that reads it, compiled as on a GPU, where codes of rows above `shortest` follow."""
    monkeypatch.setattr(norm, "on_gpu", lambda x: True)
    monkeypatch.setattr(norm, "gains_by_kernels", lambda device: True)
    monkeypatch.setattr(norm, "COMPILED_ROW", shortest)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(64, eps=1e-6), nn.Linear(64, 32, bias=False)).to(torch.bfloat16)
    with torch.no_grad():
        model[0].weight.copy_(1 + 0.3 * torch.randn(64))
    octavo.convert(model, recipe, policy=octavo.Policy(min_gain=0.0))
    x = torch.randn(256, 64).to(torch.bfloat16) * 2 ** torch.randn(256, 1)
    return model, x.to(torch.bfloat16), torch.randn(256, 32).to(torch.bfloat16)


def test_compiled_readers_of_a_norm_make_their_codes_of_its_input_and_again_in_backward(monkeypatch):
    model, x, dy = _norm_and_reader(monkeypatch, 0)
    size, (dx, dweight, dw) = _compiled_step(model, x, dy)
    model, x, dy = _norm_and_reader(monkeypatch, 64)
    before, want = _compiled_step(model, x, dy)
    assert 0 <= x.numel() - (before - size) <= 4 * 256  # a byte per element, where PyTorch's own norm keeps rstd too
    assert torch.equal(dx, want[0]) and torch.equal(dweight, want[1])  # of the norm: no more is rounded than before
    normed, rstd = x.float(), torch.rsqrt(x.float().square().mean(1) + 1e-6)
    codes = quantize(normed * rstd[:, None] * model[0].weight.float(), E4M3, PER_ROW)
    h = quantize(dy.float().t() * codes.scale.t(), E4M3, PER_ROW)
    exact = dequantize(h).double() @ codes.codes.double()
    assert sqnr_db(exact, dw.double()) > 45  # the very codes; what is left is BF16's rounding


def test_compiled_readers_that_rotate_keep_no_codes_of_a_norm_even_of_short_rows(monkeypatch):
    size = {}
    for recipe in ("folded", "rotated"):
        model, x, dy = _norm_and_reader(monkeypatch, 0 if recipe == "folded" else 1024, recipe)
        size[recipe], gradients = _compiled_step(model, x, dy)
        assert all(gradient.isfinite().all() for gradient in gradients)
    assert size["rotated"] == size["folded"]


def test_compiled_evaluations_read_the_codes_of_eager_ones(monkeypatch):
    model, x, _ = _norm_and_reader(monkeypatch, 0)
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), model(x))
    torch._dynamo.reset()


class _Written(nn.Sequential):
    """A norm and its reader, and a write to the norm's result, or to its input, before the reader reads."""

    def __init__(self, norm, layer, write):
        super().__init__(norm, layer)
        self.write = write

    def forward(self, x):
        x = x + 1
        y = self[0](x)
        self.write(x, y)
        return self[1](y)


WRITES = {
    "nothing": lambda x, y: None,
    "y": lambda x, y: y.mul_(3),
    "a part of y": lambda x, y: y[:, :8].zero_(),
    "a view of y": lambda x, y: y.flatten().mul_(3),
    "y, in place": lambda x, y: torch.relu_(y),
    "x": lambda x, y: x.mul_(3),
}


SLOW_WRITES = ("a view of y", "y, in place")
"""For a compiler they are writes to y."""


@pytest.mark.parametrize(
    "write", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_WRITES else ()) for name in WRITES]
)
def test_codes_of_a_norm_whose_result_or_input_is_written_to_are_not_read(write, monkeypatch):
    model, x, _ = _norm_and_reader(monkeypatch, 0)
    model, made, own = _Written(*model, WRITES[write]), [], kernels.quantize_normed
    monkeypatch.setattr(kernels, "quantize_normed", lambda *args: made.append(1) or own(*args))
    with torch.no_grad():
        assert sqnr_db(model(x).double(), torch.compile(model, backend="aot_eager", fullgraph=True)(x).double()) > 30
    assert bool(made) == (write == "nothing")
    torch._dynamo.reset()


def test_a_compiled_norm_without_a_reader_in_fp8_pins_nothing_to_its_result(monkeypatch):
    """What is pinned would become results of the graph, and stay in memory as long as y."""
    model, x, _ = _norm_and_reader(monkeypatch, 0)
    norm.adopt(model[0], None)
    with torch.no_grad():
        y = torch.compile(model[0], backend="aot_eager", fullgraph=True)(x)
    assert not hasattr(y, "_octavo_traced") and torch.equal(y, model[0](x))
    torch._dynamo.reset()


def test_what_a_compiled_norm_pins_to_its_result_is_read_in_its_own_graph_only(monkeypatch):
    model, x, _ = _norm_and_reader(monkeypatch, 0)
    first, second = (torch.compile(module, backend="aot_eager", fullgraph=True) for module in model)
    with torch.no_grad():
        y = first(x)
        assert y._octavo_traced.x.data_ptr() == x.data_ptr()
        y.mul_(3)
        assert torch.equal(second(y), model[1](y))
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=True), copy.deepcopy(y)):
        assert torch.equal(other, y) and not isinstance(other.__dict__.get("_octavo_traced"), type(y._octavo_traced))
    torch._dynamo.reset()


@pytest.mark.gpu
def test_on_a_gpu_compiled_readers_of_a_norm_keep_no_codes():
    torch._dynamo.reset()
    model = nn.Sequential(nn.RMSNorm(2048), nn.Linear(2048, 512, bias=False)).cuda().bfloat16()
    octavo.convert(model, policy=octavo.Policy(min_gain=0.0))
    x, dy = torch.randn(1024, 2048, device="cuda").bfloat16(), torch.randn(1024, 512, device="cuda").bfloat16()
    outcomes = []
    for run in (model, torch.compile(model, fullgraph=True)):
        kept, inputs = {}, x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.setdefault(t.data_ptr(), t), lambda t: t
        ):
            y = run(inputs)
        outcomes.append([y, *torch.autograd.grad(y, (inputs, *model.parameters()), dy)])
        sizes = [tensor.numel() for tensor in kept.values() if tensor.element_size() == 1]
    assert x.numel() not in sizes  # of the compiled one
    for eager, compiled in zip(*outcomes, strict=True):
        assert sqnr_db(eager.double(), compiled.double()) > 30
    torch._dynamo.reset()
