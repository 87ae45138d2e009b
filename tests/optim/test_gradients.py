"""One-byte gradients: stored once, never accumulated as codes, clipped and checked for overflow by their codes."""

import math
from contextlib import nullcontext

import pytest
import ranks
import torch
from network import backward, model
from torch import nn

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.storage import groups_of
from octavo.optim import TIERS, Adam, AdamW, Lion, Muon, bytes_per_parameter, keep_none
from octavo.tensor import FP8Tensor

FP8 = {"gradients": "fp8", "keep": keep_none}
OPTIMIZERS = [AdamW, Adam, Lion, Muon]


def rounded(gradient, one_scale=False):
    """Round to E4M3 with a power-of-two scale for 128 values of a row, or for all: by definition, in FP64."""
    x = gradient.double().reshape(1, -1) if gradient.dim() == 1 else gradient.double()
    padded = nn.functional.pad(x, (0, groups_of(x.shape[1]) * 128 - x.shape[1]))
    groups = padded.reshape(1, -1) if one_scale else padded.reshape(-1, 128)
    amax = groups.abs().amax(dim=1, keepdim=True)
    scale = torch.where(amax > 0, torch.exp2(torch.ceil(torch.log2(amax / 448))), 1.0)
    codes = (groups / scale).float().to(torch.float8_e4m3fn).double() * scale
    return codes.reshape(padded.shape)[:, : x.shape[1]].reshape(gradient.shape).float()


def step_of(kind, net, **settings):
    return kind(net.named_parameters(), lr=1e-3, rounding="nearest", **settings)


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("states", ["fp32", "fp8-lm", "fp8-min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_step_is_that_of_the_rounded_gradient(kind, states, dtype):
    a, b = model(dtype), model(dtype)
    ours, plain = step_of(kind, a, states=states, **FP8), step_of(kind, b, states=states, keep=keep_none)
    for step in range(3):
        backward(a, step), backward(b, step)
        assert all(p.grad is None for p in a.parameters())
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            # As FP32: BF16 holds every E4M3 value, if its scale is in range.
            q.grad = rounded(q.grad, one_scale=states == "fp8-lm").to(dtype)
            assert torch.equal(ours.gradient(p), q.grad.float())
        ours.step(), plain.step()
        ours.zero_grad(), plain.zero_grad()
    assert same(a, b)


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("states", TIERS)
def test_bytes_are_counted_in_the_tensors(states, weight):
    value = torch.randn(32, 256).bfloat16()
    parameter = nn.Parameter(FP8Tensor.from_tensor(value) if weight == torch.float8_e4m3fn else value.to(weight))
    optimizer = AdamW([parameter], states=states, **FP8)
    parameter.grad = torch.randn(32, 256).to(parameter.dtype)
    optimizer.step()
    assert parameter.grad is None
    said = bytes_per_parameter(states, weight=weight, gradient=torch.float8_e4m3fn, shape=(32, 256))
    assert optimizer.report() == pytest.approx({"master": 0.0, **said})
    optimizer.zero_grad()
    assert optimizer.report()["gradient"] == 0 and optimizer.gradient(parameter) is None


def test_the_bytes_of_the_papers_table():
    def total(states, weight):
        return bytes_per_parameter(states, weight=weight, gradient=torch.float8_e4m3fn)["total"]

    eight = torch.float8_e4m3fn
    assert total("fp8-lm", eight) == pytest.approx(7, abs=0.01)  # 6 but for the weight that is computed with
    assert total("fp8", eight) == pytest.approx(6, abs=0.05)
    assert total("fp8-min", eight) == pytest.approx(5, abs=0.05)
    released = bytes_per_parameter("fp8-min", weight=eight, gradient=None)["total"]
    assert released == pytest.approx(4, abs=0.05)


@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_gradients_add_up_before_they_are_rounded(kind):
    a, b = model(), model()
    ours, plain = step_of(kind, a, states="fp32", **FP8), step_of(kind, b, states="fp32", keep=keep_none)
    with ours.accumulating():
        for seed in range(4):
            backward(a, seed), backward(b, seed)
        assert all(p.grad is not None for p in a.parameters())
    assert all(p.grad is None for p in a.parameters())
    for p in b.parameters():
        p.grad = rounded(p.grad)
    ours.step(), plain.step()
    assert same(a, b)


def test_released_gradients_add_up_too():
    a, b = model(), model()
    ours, plain = AdamW(a.parameters(), release=True), AdamW(b.parameters())
    with ours.accumulating(), ours.accumulating():
        for seed in range(3):
            backward(a, seed), backward(b, seed)
    ours.step(), plain.step()
    assert same(a, b)


def test_a_second_backward_says_what_to_do():
    net = model()
    optimizer = AdamW(net.parameters(), **FP8)
    backward(net, 0)
    with pytest.raises(UnsupportedError, match=r"with optimizer.accumulating\(\)"):
        backward(net, 1)
    with pytest.raises(UnsupportedError, match="inside"), optimizer.accumulating():
        backward(net, 1)
    with pytest.raises(UnsupportedError, match="step, then zero_grad"):
        optimizer.convert_states("exact")
    optimizer.zero_grad()
    backward(net, 1)
    optimizer.step()
    net.zero_grad()  # does not see them
    with pytest.raises(UnsupportedError, match=r"model.zero_grad\(\) does"):
        backward(net, 2)


def test_an_error_inside_stores_nothing_and_ends_the_accumulation():
    net = model()
    optimizer = AdamW(net.parameters(), **FP8)
    with pytest.raises(RuntimeError, match="mine"), optimizer.accumulating():
        backward(net, 0)
        raise RuntimeError("mine")
    assert net[0].weight.grad is not None
    optimizer.zero_grad()
    backward(net, 0)
    assert net[0].weight.grad is None


@pytest.mark.parametrize("states", ["fp8", "fp8-lm"])
def test_clipping_is_of_the_codes(states):
    a, b = model(), model()

    def groups(net):
        return [{"params": net[0].parameters(), "clip": 0.01}, {"params": net[2].parameters()}]

    ours, plain = (AdamW(groups(net), states=states, clip=0.1, keep=keep_none) for net in (a, b))
    ours = AdamW(groups(a), states=states, clip=0.1, **FP8)
    backward(a, 0, 10.0), backward(b, 0, 10.0)
    for p in b.parameters():
        p.grad = rounded(p.grad, one_scale=states == "fp8-lm")
    ours.step(), plain.step()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in b.parameters()))
    assert norm > 0.1 and float(ours.grad_norm) == pytest.approx(norm, rel=1e-6)
    assert same(a, b)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("states", ["fp8", "fp8-lm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_finite_is_seen_in_the_codes(states, bad, dtype):
    net = model(dtype)
    optimizer = AdamW(net.parameters(), states=states, **FP8)
    net[0].weight.register_hook(lambda g: g.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(bad).to(g)))
    before = [p.detach().clone() for p in net.parameters()]
    backward(net, 0)
    optimizer.step()
    assert int(optimizer.skipped) == 1
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


def test_a_gradient_scaler_is_refused_and_a_scale_of_ones_own_is_not():
    a, b = model(), model()
    ours, plain = AdamW(a.parameters(), states="fp8", **FP8), AdamW(b.parameters(), states="fp8", **FP8)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert float(scaler.scale(torch.ones(()))) == 1024
    backward(a, 0, 1024.0)
    with pytest.raises(UnsupportedError, match="GradScaler cannot see"):
        scaler.step(ours)
    ours.found_inf = ours.grad_scale = None
    ours.grad_scale = torch.tensor(1024.0)
    backward(b, 0)
    ours.step(), plain.step()
    assert same(a, b)


def test_norms_and_embeddings_stay_wide():
    net = nn.ModuleDict({"embed": nn.Embedding(64, 128), "linear": nn.Linear(128, 64), "norm": nn.LayerNorm(64)})
    optimizer = AdamW(net.named_parameters(), gradients="fp8")
    net["norm"](net["linear"](net["embed"](torch.arange(64)))).square().sum().backward()
    assert [name for name, p in net.named_parameters() if p.grad is None] == ["linear.weight"]
    optimizer.step()
    assert optimizer.grad_norm is not None


def test_memory_can_be_kept_for_a_graph_and_gradients_set_by_hand():
    net = model()
    optimizer = AdamW(net.parameters(), **FP8)
    backward(net, 0)
    at = [optimizer._gradients.stored[e.number].codes.data_ptr() for e in optimizer.entries()]
    optimizer.zero_grad(set_to_none=False)
    optimizer.zero_grad(set_to_none=False)
    assert all(optimizer.gradient(p) is None for p in net.parameters())
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert at == [optimizer._gradients.stored[e.number].codes.data_ptr() for e in optimizer.entries()]
    assert all(torch.equal(optimizer.gradient(p), torch.ones_like(p)) for p in net.parameters())


def test_memory_in_another_order():
    value = torch.randn(6, 5, 3, 3)
    a = nn.Parameter(value.clone().to(memory_format=torch.channels_last))
    b = nn.Parameter(value.clone())
    for p in (a, b):
        optimizer = AdamW([p], states="fp32", gradients="fp8", keep=keep_none)
        (p * torch.arange(3.0)).sum().backward()
        assert torch.equal(optimizer.gradient(p), torch.arange(3.0).expand_as(p))
        optimizer.step()
    assert torch.equal(a, b)


@pytest.mark.parametrize("settings", [FP8, {"release": True}], ids=["fp8", "release"])
def test_an_optimizer_that_is_no_more_takes_no_gradients(settings):
    net = model()
    optimizer = AdamW(net.parameters(), **settings)
    backward(net, 0)
    assert net[0].weight.grad is None
    del optimizer
    backward(net, 0)
    assert net[0].weight.grad is not None


@pytest.mark.parametrize("shape", [(5, 0), (0, 5), (0,), (4, 0, 3)], ids=str)
@pytest.mark.parametrize("states", ["fp32", "fp8", "fp8-lm"])
def test_an_empty_parameter_is_stepped_to_nothing(states, shape):
    empty, other = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.ones(8, 128))
    optimizer = AdamW([empty, other], states=states, **FP8)
    for _ in range(2):
        (empty.sum() + other.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(optimizer.grad_norm) == pytest.approx(32.0) and (other < 1).all()
    optimizer.load_state_dict(optimizer.state_dict())


SETTINGS = {"default": {}, "unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}
"""With these settings DDP writes gradients back, or not."""
OWN = {"release": {"release": True}, "gradients": {"gradients": "fp8"}}


def under_ddp(rank, world):
    """Return what comes of each pair of settings, at a first backward and within `accumulating`; and beside DDP."""
    found = {
        f"{settings} {own}": [ddp(rank, accumulates, SETTINGS[settings], OWN[own]) for accumulates in (False, True)]
        for settings in SETTINGS
        for own in OWN
    }
    return {**found, "beside": beside_ddp()}


def ddp(rank, accumulates, settings, own):
    """Return the weights after two steps; or what is said when they are refused, and whether weights have changed."""
    net = nn.parallel.DistributedDataParallel(model(), **settings)
    optimizer = AdamW(net.module.named_parameters(), lr=1e-2, **own)
    try:
        for step in range(2):
            with optimizer.accumulating() if accumulates else nullcontext():
                backward(net, 10 * step + rank)
            optimizer.step()
            optimizer.zero_grad()
    except UnsupportedError as error:
        return str(error), same(net, model())
    return [p.detach() for p in net.parameters()]


@pytest.fixture(scope="module")
def on_two():
    return ranks.run(under_ddp, 2)


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("settings", SETTINGS)
def test_gradients_are_not_taken_before_they_are_reduced(settings, own, on_two):
    (refused, one), (refused_too, other) = (found[f"{settings} {own}"] for found in on_two)
    for said, is_unchanged in (refused, refused_too):
        assert "before DistributedDataParallel" in said and "accumulating()" in said and own in said
        assert is_unchanged
    assert all(torch.equal(p, q) for p, q in zip(one, other, strict=True))


def beside_ddp():
    """Parameters that DDP leaves alone, and a model that was wrapped before."""
    wrapped = nn.parallel.DistributedDataParallel(model())
    own, inside = AdamW(model().parameters(), release=True), wrapped.module
    backward_of(own)
    wrapped.itself = [wrapped]  # garbage for the collector
    del wrapped
    backward_of(AdamW(inside.parameters(), release=True))
    net = nn.ModuleDict({"reduced": model(), "expert": model()})
    ignored = [f"expert.{name}" for name, _ in net["expert"].named_parameters()]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
    outer = nn.parallel.DistributedDataParallel(net)
    backward_of(AdamW(net["expert"].parameters(), release=True))
    return isinstance(outer, nn.Module)


def backward_of(optimizer):
    sum(p.square().sum() for p in optimizer.param_groups[0]["params"]).backward()
    optimizer.step()


def test_ddp_over_other_parameters_is_no_obstacle(on_two):
    assert [found["beside"] for found in on_two] == [True, True]


@pytest.mark.parametrize("then", [
    lambda optimizer: optimizer.step(),
    lambda optimizer: optimizer.zero_grad(),
    lambda optimizer: optimizer.accumulating().__enter__(),
], ids=["step", "zero_grad", "accumulating"])  # fmt: skip
def test_a_gradient_written_after_its_release_is_not_dropped_in_silence(then):
    net = model()
    optimizer = AdamW(net.parameters(), release=True)
    backward(net, 0)
    optimizer.step()
    net[0].weight.grad = torch.ones_like(net[0].weight)  # set by hand after a step, and stepped by the next
    optimizer.step()
    backward(net, 1)
    net[0].weight.grad = torch.ones_like(net[0].weight)
    before = net[0].weight.detach().clone()
    with pytest.raises(UnsupportedError, match="has a gradient again"):
        then(optimizer)
    assert torch.equal(net[0].weight, before)


@pytest.mark.parametrize("unscales", [False, True])
def test_a_gradient_scaler_that_comes_after_the_release_is_refused(unscales):
    net = model()
    optimizer = AdamW(net.parameters(), release=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    backward(net, 0, 1024.0)
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(UnsupportedError, match="release=True has stepped the weights"):
        scaler.step(optimizer)


def test_bad_input():
    weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ConfigError, match="Did you mean 'fp8'"):
        AdamW([weight], gradients="fp88")
    with pytest.raises(ConfigError, match="frees every gradient"):
        AdamW([weight], gradients="fp8", release=True)
    with pytest.raises(ConfigError, match="frees every gradient"):
        AdamW([{"params": [weight], "gradients": "fp8"}], release=True)


def test_gradients_of_many_parameters_are_found_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    optimizer = AdamW(net.parameters(), gradients="fp8")
    net(torch.ones(2, 8)).sum().backward()
    expected = [optimizer.gradient(parameter) for parameter in net.parameters()]
    passes, entries = [], optimizer.entries
    monkeypatch.setattr(optimizer, "entries", lambda: passes.append(1) or entries())
    for found, known in zip(optimizer.gradients(net.parameters()), expected, strict=True):
        assert found is not None and torch.equal(found, known)
    assert len(passes) == 1, "the host's time per step is not to grow with the square of their number"
