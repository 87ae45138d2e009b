"""Weight codes that are made once per optimizer step, without a hint when the micro-batches of a step begin."""

import copy
import pickle

import pytest
import torch
from torch import nn

import octavo
from octavo import kernels
from octavo.nn import reuse_weight_codes_per_step
from writes import EAGER_WAYS, WAYS, fault_in, net, results

MICRO_BATCHES = 3


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[torch.Tensor]:
    """Return the parameters after some steps of several micro-batches."""
    for step in range(steps):
        for micro_batch in range(MICRO_BATCHES):
            x = torch.randn(5, 32, generator=torch.Generator().manual_seed(10 * step + micro_batch))
            x = x.to(next(model.parameters()).device).requires_grad_()
            model(x.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(("recipe", "compiled"), [("folded", False), ("tensorwise", False), ("folded", True)])
def test_weights_are_quantised_once_per_step_with_the_bits_of_each_forward(recipe, compiled):
    def run(reuse: bool) -> tuple[list[torch.Tensor], int]:
        model = nn.Sequential(net(recipe), net(recipe))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if reuse:
            reuse_weight_codes_per_step(model, optimizer)
        for block in model.children() if compiled else ():
            block.compile(backend="aot_eager", fullgraph=True)
        with kernels.record() as ledger:
            return accumulated(model, optimizer), ledger.weights

    (expected, made_each), (got, made_once) = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert made_once == 2 * 6, "six layers, two steps"
    assert made_each == 2 * 6 * MICRO_BATCHES
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * compiled, "with and without codes"


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_results_are_those_of_codes_made_in_each_forward(dtype, fused):
    """Where weights are sealed, not compared: a kernel that asks for a mutable pointer has codes made again."""

    def run(reuse: bool) -> tuple[list[torch.Tensor], int]:
        model = nn.Sequential(net("folded"), net("folded")).to("cuda", dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        if reuse:
            reuse_weight_codes_per_step(model, optimizer)
        with kernels.record() as ledger:
            return accumulated(model, optimizer), ledger.weights

    (expected, made_each), (got, made) = run(False), run(True)
    assert 2 * 6 <= made <= made_each
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("way", [*WAYS, *EAGER_WAYS])
def test_whatever_writes_to_a_weight_between_two_forwards_is_seen(way):
    """Also where the optimizer is none that says so."""
    model = net("folded")
    reuse_weight_codes_per_step(model)
    assert not fault_in(way, "folded", model, model)


def test_another_recipe_is_seen():
    model, x = net("folded"), torch.randn(5, 32)
    reuse_weight_codes_per_step(model)
    model(x)
    octavo.convert(model, "tensorwise", policy=octavo.Policy(min_gain=0.0, min_features=16))
    assert torch.equal(model(x), net("tensorwise")(x))
    octavo.revert(model)
    assert torch.equal(model(x), octavo_free(model)(x))


def octavo_free(model: nn.Module) -> nn.Module:
    plain = copy.deepcopy(model)
    octavo.revert(plain)
    return plain


def test_an_evaluation_makes_no_codes_and_reads_those_that_are_there():
    model, x = net("folded"), torch.randn(5, 32)
    reuse_weight_codes_per_step(model)
    with torch.no_grad():
        model(x)
        assert model.out.weight_codes is None
    model(x)
    with torch.no_grad(), kernels.record() as ledger:
        model(x)
    assert ledger.weights == 0


def test_codes_go_before_the_optimizer_steps_and_at_the_end():
    model, x = net("folded"), torch.randn(5, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    codes = reuse_weight_codes_per_step(model, optimizer)
    model(x).sum().backward()
    assert model.out.weight_codes is not None
    optimizer.step()
    assert model.out.weight_codes is None
    model(x)
    codes.remove()
    assert model.out.weight_codes is None and not model._forward_pre_hooks
    with kernels.record() as ledger:
        model(x), model(x)
    assert ledger.weights == 2 * 3


def test_copies_and_files_of_the_model_have_none():
    model, x = net("folded"), torch.randn(5, 32)
    reuse_weight_codes_per_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for p in other.parameters():
            p.data.mul_(3.0)
        assert torch.equal(other(x), net("folded", values=other)(x)) and other.out.weight_codes is None


def test_a_replica_of_the_model_makes_none():
    model, x = net("folded"), torch.randn(5, 32)
    reuse_weight_codes_per_step(model)
    replica = copy.copy(model)
    replica.__dict__ = dict(model.__dict__)
    replica(x)
    assert model.out.weight_codes is None


def test_weights_that_hooks_bring_are_left_alone():
    model = net("folded")
    expected = results(model, model)
    model.out.register_forward_pre_hook(lambda *_: None)
    reuse_weight_codes_per_step(model)
    assert all(torch.equal(a, b) for a, b in zip(results(model, model), expected, strict=True))
    assert model.out.weight_codes is None and model.q.weight_codes is not None
