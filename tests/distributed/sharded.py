"""Shared by the tests of sharded models: two equal tiny Llamas, and a run of them."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import octavo
from octavo.distributed import shard
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.llama import Llama

FP32 = MixedPrecisionPolicy()
"""Nothing is cast, as in a run of one process."""
SHAPE = {"dim": 64, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 160, "vocab": 96, "sequence": 16}


def llama(recipe="folded", policy=None, dtype=torch.float32, **shape):
    torch.manual_seed(0)
    model = Llama(ModelConfig(**{**SHAPE, **shape})).to(dtype)
    with torch.no_grad():  # rows and columns of other sizes, so that recipes with other scales have other codes
        for weight in model.layers.parameters():
            if weight.dim() == 2:
                rows, cols = (torch.randn(n).mul(1.5).exp() / 3 for n in weight.shape)
                weight.mul_(rows[:, None] * cols)
    octavo.convert(model, recipe, policy=policy)
    return model


def batch(step, ranks):
    tokens = torch.randint(
        0, SHAPE["vocab"], (ranks, SHAPE["sequence"] + 1), generator=torch.Generator().manual_seed(step)
    )
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, tokens, targets):
    with torch.autocast("cpu", torch.bfloat16):
        return model(tokens, targets)


def step_sharded(model, optimizer, step, rank, ranks):
    """Return the loss of each rank before a step in which each has one sequence."""
    tokens, targets = batch(step, ranks)
    loss = loss_of(model, tokens[rank : rank + 1], targets[rank : rank + 1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses = torch.zeros(ranks)
    losses[rank] = loss.detach()
    dist.all_reduce(losses)
    return losses.tolist()


def step_alone(model, optimizer, step, ranks):
    """The same by one process, a sequence after another."""
    tokens, targets = batch(step, ranks)
    losses = []
    for row in range(ranks):
        loss = loss_of(model, tokens[row : row + 1], targets[row : row + 1])
        (loss / ranks).backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def full_state(model):
    """Return the whole tensors of a sharded model's state dict."""
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}


def unshard(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def reshard(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


__all__ = [
    "FP32",
    "batch",
    "full_state",
    "llama",
    "loss_of",
    "reshard",
    "shard",
    "step_alone",
    "step_sharded",
    "unshard",
]
