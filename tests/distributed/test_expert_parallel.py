"""Experts of two ranks against one rank with all of them, on all tokens."""

import pytest
import ranks
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import octavo
from octavo.distributed import expert_parallel, rank_loads
from octavo.errors import ConfigError, UnsupportedError
from octavo.lab.models.moe import Experts
from octavo.numerics import sqnr_db
from octavo.tensor import local

E, D, H, T, S = 6, 48, 32, 21, 2


def model(recipe, experts=E):
    torch.manual_seed(0)
    layer = nn.ModuleDict({"experts": Experts(experts, D, H)})
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    octavo.convert(layer, recipe)
    return layer


def tokens(ranks, skewed=False):
    torch.manual_seed(1)
    x, dy = torch.randn(2, ranks * T, D)
    scores = torch.randn(ranks * T, E) + (torch.arange(E) < 3) * (100.0 if skewed else 0.0)
    weights, ids = scores.softmax(1).topk(S)
    return x, ids, weights, dy


def step(layer, x, ids, weights, dy):
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = layer["experts"](x, ids, weights)
    y.backward(dy)
    return [y.detach(), x.grad, weights.grad, *(local(parameter.grad) for parameter in layer.parameters())]


def alone_and_parallel(rank, ranks_, recipe, skewed, enabled):
    whole = tokens(ranks_, skewed)
    mine = [part.chunk(ranks_)[rank] for part in whole]
    layer = model(recipe)
    octavo.conversion.enable(layer, enabled)
    expected = step(layer, *whole)
    expected = [part.chunk(ranks_)[rank] for part in expected]
    layer.zero_grad()
    assert expert_parallel(layer, init_device_mesh("cpu", (ranks_,))) == ["experts"]
    found = step(layer, *mine)
    found[3:] = [part * ranks_ for part in found[3:]]  # of the mean of the losses
    names = [name for name, _ in layer.named_parameters()]
    return [sqnr_db(a, b) if a.any() else 200.0 for a, b in zip(expected, found, strict=True)], names, rank_loads(layer)


@pytest.mark.parametrize(
    ("recipe", "skewed", "enabled"),
    [
        ("folded", False, True),
        ("folded", True, True),
        ("rowwise", False, True),
        ("rotated", False, True),
        ("folded", False, False),
    ],
)
def test_two_ranks_compute_what_one_does(recipe, skewed, enabled):
    for scores, names, loads in ranks.run(alone_and_parallel, 2, recipe, skewed, enabled):
        assert min(scores) > 100, scores
        assert names == ["experts.gate_up", "experts.down"]
        assert (loads["experts"] == 2.0) == skewed  # all tokens went to the experts of the first rank


class SortedExperts(nn.Module):
    """Experts that are called with sorted rows, as torchtitan's."""

    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.randn(4, 48, 32) / 6) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(4, 32, 48) / 7)

    def forward(self, x, num_tokens_per_expert):
        outputs = []
        for e, part in enumerate(torch.split(x, num_tokens_per_expert.tolist(), dim=0)):
            outputs.append((F.silu(part @ self.w1[e].mT) * (part @ self.w3[e].mT)) @ self.w2[e].mT)
        return torch.cat(outputs, dim=0)


def refused(rank, ranks_):
    mesh = init_device_mesh("cpu", (ranks_,))
    routed = nn.ModuleDict({"experts": SortedExperts()})
    octavo.convert(routed, "folded")
    models = nn.Linear(32, 32), model("folded", 3), routed
    kinds = ConfigError, UnsupportedError
    return [ranks.refusal(kinds, lambda m=each: expert_parallel(m, mesh)) for each in models]


def test_what_cannot_be_shared():
    for none, odd, routed in ranks.run(refused, 2):
        assert "no experts in FP8" in none and "the 3 experts of 'experts' do not divide by 2 ranks" in odd
        assert "'experts' is called with the rows of each expert" in routed
