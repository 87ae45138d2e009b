from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.errors import ConfigError
from octavo.lab.models import ModelConfig, build
from octavo.lab.models import language_model as module
from octavo.lab.models.language_model import check_length, cross_entropy, head_loss, hit_shares
from octavo.nn import Linear
from octavo.recipes import load


def head_of(bias: bool = False) -> tuple[Tensor, nn.Linear, Tensor]:
    return torch.randn(2, 9, 64, requires_grad=True), nn.Linear(64, 96, bias=bias), torch.randint(96, (2, 9))


def gradients(loss: Tensor, x: Tensor, head: nn.Linear) -> list[Tensor]:
    return [loss, *torch.autograd.grad(loss, [x, *head.parameters()])]


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The recipe of each call of the fused loss."""
    calls: list[object] = []
    real = module.linear_cross_entropy
    monkeypatch.setattr(module, "linear_cross_entropy", lambda *a, **k: calls.append(k["recipe"]) or real(*a, **k))
    return calls


def test_the_loss_of_bf16_logits_is_computed_in_fp32() -> None:
    logits_BTV = (4 * torch.randn(2, 5, 300)).bfloat16()
    targets_BT = torch.randint(0, 300, (2, 5))
    exact = -logits_BTV.double().log_softmax(-1).gather(-1, targets_BT[..., None]).mean()
    torch.testing.assert_close(cross_entropy(logits_BTV, targets_BT).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_head_and_loss_in_one_give_what_they_give_apart(bias: bool, fused_calls: list[object]) -> None:
    x, head, targets = head_of(bias)
    together = gradients(head_loss(x, head, targets), x, head)
    apart = gradients(cross_entropy(head(x), targets), x, head)
    assert fused_calls == ["bf16"]
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_under_autocast_too(fused_calls: list[object]) -> None:
    x, head, targets = head_of()
    with torch.autocast("cpu", torch.bfloat16):
        together, apart = head_loss(x, head, targets), cross_entropy(head(x), targets)
    torch.testing.assert_close(together, apart, rtol=1e-6, atol=0)
    for one, other in zip(gradients(together, x, head), gradients(apart, x, head), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * other.abs().max().item())
    assert fused_calls == ["bf16"]


def test_an_fp8_head_keeps_its_recipe_and_its_switch(fused_calls: list[object]) -> None:
    x, head, targets = head_of()
    recipe = load("rowwise")
    Linear.adopt(head, recipe)
    with kernels.record() as ledger:
        head_loss(x, head, targets)
        assert sum(ledger.gemms.values()) == 3
        head.enabled = False
        head_loss(x, head, targets)
        assert sum(ledger.gemms.values()) == 3
    assert fused_calls == [recipe, "bf16"]


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def doubles(head: nn.Linear, how: str) -> nn.Linear:
    """Make a head return twice its logits."""
    if how == "subclass":
        head.__class__ = Doubled
    elif how == "hook":
        head.register_forward_hook(lambda module, args, output: 2 * output)
    elif how == "pre-hook":
        head.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    else:
        head.forward = lambda x: 2 * x @ head.weight.t()
    return head


@pytest.mark.parametrize("how", ["subclass", "hook", "pre-hook", "forward"])
def test_a_head_that_does_more_is_called(how: str, fused_calls: list[object]) -> None:
    x, head, targets = head_of()
    expected = cross_entropy(2 * head(x), targets)
    torch.testing.assert_close(head_loss(x, doubles(head, how), targets), expected)
    assert fused_calls == []


def test_backward_hooks_run() -> None:
    x, head, targets = head_of()
    seen = []
    head.register_full_backward_hook(lambda module, before, after: seen.append(after[0].shape))
    head_loss(x, head, targets).backward()
    assert seen == [(2, 9, 96)]


@pytest.mark.parametrize("architecture", ["llama", "gpt"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_models_lose_what_their_logits_say(architecture: str, tied: bool) -> None:
    config = ModelConfig(
        architecture=architecture, vocab=48, dim=32, layers=2, heads=4, sequence=16, tie_embeddings=tied
    )
    model, tokens, targets = build(config, 0), torch.randint(48, (3, 16)), torch.randint(48, (3, 16))
    parameters = list(model.parameters())
    losses = [model(tokens, targets), cross_entropy(model(tokens), targets)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for one, other in zip(*(torch.autograd.grad(loss, parameters) for loss in losses), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_whole_model_compiles_with_its_loss() -> None:
    torch._dynamo.reset()
    config = ModelConfig(vocab=48, dim=32, layers=1, heads=4, sequence=16)
    model, tokens = build(config, 0), torch.randint(48, (3, 16))
    eager = model(tokens, tokens)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens, tokens)
    torch.testing.assert_close(compiled, eager)
    for one, other in zip(
        *(torch.autograd.grad(loss, list(model.parameters())) for loss in (compiled, eager)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_length_up_to_the_models_is_accepted() -> None:
    assert check_length(torch.zeros(3, 8), 8) == 8
    with pytest.raises(ConfigError, match=r"model\.sequence"):
        check_length(torch.zeros(3, 9), 8)


def test_a_head_that_keeps_scales_is_called_as_a_layer():
    head = Linear(32, 64, bias=False, recipe="delayed")
    x, targets = torch.randn(2, 8, 32), torch.randint(64, (2, 8))
    loss = head_loss(x, head, targets)
    assert torch.equal(loss, cross_entropy(head(x), targets))
    assert head.scaling_slot.scale_and_amax[0, 1] == x.abs().max()


@pytest.mark.parametrize("recipe", ["bf16", "folded"])
def test_beside_each_loss_the_share_of_targets_that_were_likeliest(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, head, targets = head_of()
    if recipe != "bf16":
        Linear.adopt(head, load(recipe))
    likeliest = head(x).argmax(-1)
    targets[0, :6], targets[1] = likeliest[0, :6], (likeliest[1] + 1) % 96
    targets[0, 6:] = (likeliest[0, 6:] + 1) % 96
    monkeypatch.setattr(module, "chunk_of", lambda *_: 4)  # tokens, of 9
    found = head_loss(x, head, targets, hits=True)
    assert torch.equal(found[:, 0], head_loss(x, head, targets, by_sequence=True))
    torch.testing.assert_close(found[:, 1], torch.tensor([6 / 9, 0.0]))
    assert torch.equal(found[:, 1], hit_shares(x, head, targets))


@pytest.mark.parametrize("architecture", ["llama", "gpt"])
def test_models_give_both(architecture: str) -> None:
    model = build(ModelConfig(architecture=architecture, vocab=32, dim=16, layers=1, heads=2, ffn=32, sequence=8), 0)
    inputs, targets = torch.randint(32, (2, 5, 8))
    found = model(inputs, targets, hits=True)
    assert torch.equal(found[:, 0], model(inputs, targets, by_sequence=True))
    assert torch.equal(found[:, 1], (model(inputs).argmax(-1) == targets).float().mean(1))
