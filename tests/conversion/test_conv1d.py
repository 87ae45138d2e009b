"""`Conv1D` of transformers, whose weight is (K, N), is computed as the linear layer that it is."""

import copy

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs transformers")

from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import octavo
from octavo import Policy, kernels
from octavo.nn import reuse_weight_codes
from octavo.nn.linear import LinearLayer

RECIPES = ["folded", "rowwise", "tensorwise", "delayed", "block"]


def pair(rows: int = 96, cols: int = 64) -> tuple[nn.Sequential, nn.Sequential]:
    """Return a model of one Conv1D, and the same of an nn.Linear."""
    torch.manual_seed(0)
    theirs, ours = Conv1D(rows, cols), nn.Linear(cols, rows)
    with torch.no_grad():
        ours.weight.copy_(theirs.weight.t())
        theirs.bias.copy_(ours.bias)
    return nn.Sequential(theirs), nn.Sequential(ours)


def results(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    gradient = model[0].weight.grad
    return [y.detach(), x.grad, model[0].bias.grad, gradient.t() if isinstance(model[0], Conv1D) else gradient]


@pytest.mark.parametrize("recipe", RECIPES)
def test_its_bits_are_those_of_a_linear_layer(recipe):
    theirs, ours = pair()
    octavo.convert(theirs, recipe)
    octavo.convert(ours, recipe)
    x = torch.randn(3, 40, 64)
    with kernels.record() as ledger:
        got = results(theirs, x)
    assert sum(ledger.gemms.values()) == 3
    assert all(torch.equal(a, b) for a, b in zip(got, results(ours, x), strict=True))


def test_it_stays_what_it_was_and_comes_back():
    theirs, _ = pair()
    layer, x = theirs[0], torch.randn(5, 64)
    before, expected = {**vars(layer)}, theirs(x)
    (row,) = octavo.convert(theirs, "folded").layers
    assert (row.shape, row.kind, row.is_fp8) == ((96, 64), "stored as K x N", True)
    assert isinstance(layer, Conv1D) and isinstance(layer, LinearLayer) and "folded" in repr(layer)
    assert not isinstance(layer, nn.Linear), "libraries take the weight of an nn.Linear for (N, K)"
    twin = copy.deepcopy(theirs)
    assert torch.equal(twin(x), theirs(x)) and isinstance(twin[0], LinearLayer)
    with octavo.disabled(theirs):
        torch.testing.assert_close(theirs(x), expected)
    with reuse_weight_codes(theirs), torch.no_grad():
        assert torch.equal(theirs(x), twin(x))
    with octavo.observed(theirs) as report:
        theirs(x)
    assert "0" in str(report)
    assert str(octavo.plan(theirs, "folded")) == str(octavo.convert(theirs, "folded"))
    assert octavo.revert(theirs) == 1 and type(layer) is Conv1D and vars(layer) == before
    assert torch.equal(theirs(x), expected)


def test_its_weight_is_not_stored_in_fp8_and_the_plan_says_so():
    theirs, _ = pair()
    (row,) = octavo.convert(theirs, policy=Policy(weights="fp8")).layers
    assert (
        row.is_fp8 and row.weight == "unchanged" and row.reason == "its weight is stored as (K, N), and stays as it is"
    )


def test_gpt2_trains_and_saves_as_it_is(tmp_path):
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 96, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    plan = octavo.convert(model)
    assert plan.fp8_layers == 8 and [row.name for row in plan.layers if not row.is_fp8] == ["lm_head"]
    ids = torch.arange(2 * 24).reshape(2, 24) * 7 % 96
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    model.save_pretrained(tmp_path)
    plain = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
