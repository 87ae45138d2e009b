"""Ranks that share the tokens of sequences, against one process that has all of them."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from sharded import llama
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from octavo.distributed import context_parallel
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.runtime import ledger
from octavo.lab.models import ModelConfig, build
from octavo.nn.attention import ScaledDotProduct

SUMS = {"rtol": 2e-5, "atol": 2e-6}
"""Tolerance of FP32 values that are summed in another order."""


class Attention(torch.nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.core = ScaledDotProduct("wo", causal=causal)


def qkv() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 16, heads, 8, generator=generator).requires_grad_() for heads in (4, 2, 2)]


def of_attention(rank: int, count: int) -> dict[str, list[Tensor]]:
    """Return by mask the output of a rank's queries, and the gradients of its q, k and v."""
    results = {}
    for causal in (True, False):
        module = Attention(causal)
        context = context_parallel(module, init_device_mesh("cpu", (count,)))
        own = [context.own(x.detach()).requires_grad_() for x in qkv()]
        y = module.core(*own)
        results[str(causal)] = [y, *torch.autograd.grad(y.square().sum(), own)]
    return results


@pytest.mark.parametrize("count", [2, 4])
def test_attention_and_its_gradients_are_those_of_one_process(count: int) -> None:
    found = ranks.run(of_attention, count)
    for causal in (True, False):
        q, k, v = qkv()
        y = Attention(causal).core(q, k, v)
        for i, whole in enumerate([y, *torch.autograd.grad(y.square().sum(), (q, k, v))]):
            chunks = whole.chunk(2 * count, dim=1)
            for rank in range(count):
                expected = torch.cat([chunks[rank], chunks[-1 - rank]], dim=1)
                torch.testing.assert_close(found[rank][str(causal)][i], expected, **SUMS)


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 96, (3, 17), generator=torch.Generator().manual_seed(5))
    return ids[:, :-1], ids[:, 1:]


def of_model(rank: int, count: int, recipe: str) -> dict[str, Any]:
    """Return the mean loss over the ranks, those by sequence, and the mean gradients."""
    model = llama(recipe)
    context = context_parallel(model, init_device_mesh("cpu", (count,)))
    tokens, targets = batch()
    with context.attending(tokens):
        loss = model(tokens, targets)
        loss.backward()
    with torch.no_grad():
        by_sequence = context.mean(model(tokens, targets, by_sequence=True))
    gradients = {name: context.mean(p.grad) for name, p in model.named_parameters()}
    return {"loss": context.mean(loss), "by_sequence": by_sequence, "gradients": gradients}


@pytest.mark.parametrize(("count", "recipe"), [(2, "bf16"), (2, "rotated"), (4, "bf16")])
def test_a_models_loss_and_gradients_are_those_of_one_process(count: int, recipe: str) -> None:
    found = ranks.run(of_model, count, recipe)
    model = llama(recipe)
    loss = model(*batch())
    loss.backward()
    assert found[0]["loss"].item() == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(found[0]["by_sequence"], model(*batch(), by_sequence=True), rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        ours, whole = found[0]["gradients"][name], parameter.grad
        assert torch.equal(ours, found[1]["gradients"][name])
        # In FP8 columns of gradients are scaled by a rank's own tokens, and rounded accordingly.
        tolerance = 2e-5 if recipe == "bf16" else 0.05
        assert (ours - whole).norm() <= tolerance * whole.norm(), name


def of_pytorch(rank: int, count: int) -> bool:
    """Return whether PyTorch cuts sequences as `Context.own` does, which a ring relies on."""
    context = context_parallel(Attention(causal=True), init_device_mesh("cpu", (count,)))
    context.is_ring = True
    with context.attending(torch.zeros(1, 24, dtype=torch.int64)):
        return context._is_active and context._is_checked


def test_pytorch_gives_ranks_the_same_tokens() -> None:
    assert ranks.run(of_pytorch, 2) == [True, True]


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_what_cannot_be_shared_is_refused(alone: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"no octavo\.nn\.attention\.ScaledDotProduct"):
        context_parallel(torch.nn.Linear(2, 2), alone)
    with pytest.raises(ConfigError, match="'ring' is PyTorch's, which has no kernels for a CPU"):
        context_parallel(llama(), alone, attention="ring")
    shape = {"vocab": 48, "dim": 32, "layers": 1, "heads": 2, "sequence": 16}
    with pytest.raises(UnsupportedError, match="does not leave a document"):
        context_parallel(build(ModelConfig(**shape, documents="separate"), 0), alone)
    with pytest.raises(ConfigError, match="the mesh has 2 dimensions"):
        context_parallel(llama(), init_device_mesh("cpu", (1, 1)))
    model = llama()
    context = context_parallel(model, alone)
    with pytest.raises(UnsupportedError, match="15 tokens are not a multiple of 2"):
        model(torch.zeros(1, 15, dtype=torch.int64))
    assert torch.equal(context.own(torch.arange(4)[None]), torch.arange(4)[None])


def test_codes_of_the_output_are_not_kept_aloud(alone: Any) -> None:
    from octavo.conversion import Policy

    model = llama(policy=Policy(memory="low"))
    context_parallel(model, alone)
    with ledger.record() as seen:
        model(*batch()).backward()
    assert any("it is of several ranks" in text for text in seen.fallbacks)
