"""LoRA over layers in FP8: what is trained, what a merge gives, and that one-byte weights stay codes."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.errors import ConfigError
from octavo.lab.models import ModelConfig, build
from octavo.nn.cross_entropy import linear_cross_entropy
from octavo.nn.fp8_weights import values
from octavo.nn.linear import TransposedLinear
from octavo.nn.lora import LoRA, add_lora, merge_lora
from octavo.recipes import load
from octavo.tensor import FP8Tensor

SHAPE = ModelConfig(vocab=272, dim=64, layers=2, heads=4, ffn=128, sequence=32)
TOKENS = torch.arange(64).view(2, 32)


def adapted(weights: str | None, recipe: str = "folded") -> nn.Module:
    """A Llama with updates that are not zero; in FP8 unless `weights` is None."""
    model = build(SHAPE, 0)
    names = add_lora(model, 4, 8.0, "layers.*")
    assert len(names) == 14
    for module in model.modules():
        if isinstance(module, LoRA):
            nn.init.normal_(module.B, std=0.05)
    if weights is not None:
        octavo.convert(model, recipe, policy=octavo.Policy(min_gain=0, weights=weights))
    return model


@pytest.mark.parametrize(
    ("weights", "recipe"), [(None, "bf16"), ("unchanged", "folded"), ("unchanged", "rotated"), ("fp8", "folded")]
)
def test_only_updates_are_trained(weights: str | None, recipe: str) -> None:
    model = adapted(weights, recipe)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not isinstance(p, FP8Tensor)}
    fp8 = {name: p.codes.clone() for name, p in model.named_parameters() if isinstance(p, FP8Tensor)}
    assert bool(fp8) == (weights == "fp8")
    with torch.autocast("cpu", torch.bfloat16):
        model(TOKENS, TOKENS).backward()
    graded = {name for name, p in model.named_parameters() if p.grad is not None}
    assert graded == {name for name, _ in model.named_parameters() if ".lora." in name} and len(graded) == 28
    assert all(model.get_parameter(name).grad.abs().sum() > 0 for name in graded)
    torch.optim.SGD([model.get_parameter(name) for name in graded], lr=0.1).step()
    changed = {name for name in before if not torch.equal(before[name], model.get_parameter(name))}
    assert changed == graded
    assert all(
        torch.equal(codes.view(torch.uint8), model.get_parameter(n).codes.view(torch.uint8)) for n, codes in fp8.items()
    )


def test_gradients_are_those_of_the_definition() -> None:
    layer = nn.Linear(16, 8)
    holder = nn.Sequential(layer)
    add_lora(holder, 2, 6.0)
    nn.init.normal_(layer.lora.B)  # type: ignore[arg-type]
    a, b = (p.detach().clone().requires_grad_() for p in layer.lora.parameters())
    x = torch.randn(5, 16)
    y = x @ (layer.weight + 3.0 * b @ a).T + layer.bias
    torch.testing.assert_close(holder(x), y)
    (holder(x) ** 2).sum().backward()
    (y**2).sum().backward()
    torch.testing.assert_close(layer.lora.A.grad, a.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.lora.B.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_a_merge_of_plain_weights_gives_the_same_function() -> None:
    model = adapted(None)
    expected = model(TOKENS)
    assert merge_lora(model) == 14 and merge_lora(model) == 0
    torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-5)
    assert [*model.state_dict()] == [*build(SHAPE, 0).state_dict()]


def test_a_merge_into_codes_is_the_sum_rounded_once() -> None:
    model = adapted("fp8")
    layer = model.get_submodule("layers.1.feed_forward.w1")
    total = layer.weight.dequantize(torch.float32) + layer.lora.delta()  # type: ignore[union-attr,operator]
    merge_lora(model)
    assert isinstance(layer.weight, FP8Tensor)
    expected = FP8Tensor.from_tensor(total)
    assert torch.equal(layer.weight.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(layer.weight.scale, expected.scale)


def test_a_merge_into_a_weight_that_is_stored_transposed() -> None:
    """As of `Conv1D` of transformers, (K, N)."""
    for inputs, outputs in ((64, 64), (64, 48)):
        layer = nn.Linear(inputs, outputs)
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous())
        none = dict.fromkeys(("shared", "scaling_state", "scaling_slot"))
        TransposedLinear.take(layer, recipe=load("bf16"), enabled=True, keeps_input=False, **none)
        model = nn.Sequential(layer)
        assert add_lora(model, 4, 8.0) == ["0"]
        nn.init.normal_(layer.lora.B, std=0.3)  # type: ignore[arg-type]
        x = torch.randn(5, inputs)
        expected = model(x)
        assert merge_lora(model) == 1
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_copies_have_updates_of_their_own() -> None:
    model = adapted(None)
    twin = copy.deepcopy(model)
    merge_lora(model)
    torch.testing.assert_close(twin(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        twin.get_submodule("layers.0.attention.wq").lora.B.zero_()  # type: ignore[union-attr]
    assert not torch.allclose(twin(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-5)


def test_a_pattern_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="'nothing' matches no linear layer"):
        add_lora(build(SHAPE, 0), 4, 8.0, "nothing")


def test_a_layer_may_be_given_its_input_by_name() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16)), torch.randn(4, 16)
    add_lora(model, 2, 4.0)
    nn.init.normal_(model.get_parameter("0.lora.B"))
    expected = model(x)
    assert torch.equal(model[0](input=x), expected)
    merge_lora(model)
    torch.testing.assert_close(model[0](input=x), expected)


def test_a_second_call_is_refused_and_changes_nothing() -> None:
    """Its updates would replace the first, and the hooks of both would add them, twice."""
    model = adapted(None)
    before, expected = dict(model.named_parameters()), model(TOKENS)
    with pytest.raises(ConfigError, match=r"'layers\.0\.attention\.wq\.lora' is a LoRA update already"):
        add_lora(model, 2, 8.0, "lm_head")
    assert all(model.get_parameter(name) is p and p.requires_grad == (".lora." in name) for name, p in before.items())
    assert torch.equal(model(TOKENS), expected)
    merge_lora(model)
    assert len(add_lora(model, 2, 8.0, "layers.*")) == 14


def test_a_weight_that_another_module_reads_is_refused() -> None:
    """A merge would change the embedding, or add the updates of both layers to both."""
    model = build(dataclasses.replace(SHAPE, tie_embeddings=True), 0)
    with pytest.raises(ConfigError, match=r"lm_head\.weight is tok_embeddings\.weight too, .* without 'lm_head'"):
        add_lora(model, 4, 8.0)
    assert all(p.requires_grad for p in model.parameters())
    assert len(add_lora(model, 4, 8.0, "layers.*")) == 14
    layer = nn.Linear(16, 16)
    assert add_lora(nn.Sequential(layer, layer), 4, 8.0) == ["0"]


def test_a_weight_that_is_computed_is_refused() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.utils.parametrizations.weight_norm(nn.Linear(16, 16, bias=False)))
    with pytest.raises(ConfigError, match=r"1\.weight is computed, .* without '1'"):
        add_lora(model, 4, 8.0)
    assert add_lora(model, 4, 8.0, "0") == ["0"]


def test_a_layer_that_is_never_called_is_refused() -> None:
    """Its update would neither be trained nor applied."""
    model = nn.TransformerEncoderLayer(16, 2, 32)
    with pytest.raises(ConfigError, match=r"reads self_attn\.out_proj\.weight and never calls"):
        add_lora(model, 4, 8.0)
    assert add_lora(model, 4, 8.0, "linear*") == ["linear1", "linear2"]


@pytest.mark.parametrize("weights", [None, "unchanged", "fp8"])
def test_the_update_of_an_output_head_is_trained_with_the_loss(weights: str | None) -> None:
    """The fused loss reads the weight of a head; a head with an update is called instead."""
    model = build(SHAPE, 0)
    assert add_lora(model, 4, 8.0, "lm_head") == ["lm_head"]
    if weights is not None:
        octavo.convert(model, "folded", policy=octavo.Policy(min_gain=0, weights=weights, keep_defaults=False))
    before = model(TOKENS, TOKENS)
    before.backward()
    update = model.get_submodule("lm_head.lora")
    assert update.B.grad.abs().sum() > 0  # type: ignore[union-attr]
    nn.init.normal_(update.B, std=0.5)  # type: ignore[arg-type]
    assert not torch.isclose(model(TOKENS, TOKENS), before, rtol=1e-3, atol=0)


@pytest.mark.parametrize("weights", [None, "unchanged", "fp8"])
def test_a_loss_that_reads_a_weight_with_an_update_is_refused(weights: str | None) -> None:
    """It would be computed, and trained, without the update."""
    head, x, targets = nn.Linear(64, 80, bias=False), torch.randn(6, 64), torch.arange(6)
    model = nn.Sequential(head)
    add_lora(model, 4, 8.0)
    if weights is not None:
        octavo.convert(model, "folded", policy=octavo.Policy(min_gain=0, weights=weights, keep_defaults=False))
    with pytest.raises(ConfigError, match=r"only a call of the layer adds.*merge_lora"):
        linear_cross_entropy(x, head.weight, targets)
    nn.init.normal_(model.get_parameter("0.lora.B"))
    merge_lora(model)
    expected = nn.functional.cross_entropy(x @ values(head.weight, torch.float32).t(), targets)
    torch.testing.assert_close(linear_cross_entropy(x, head.weight, targets), expected)


def reload(model: nn.Module) -> nn.Module:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


def swap(model: nn.Module) -> nn.Module:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def move(model: nn.Module) -> nn.Module:
    return model.to("meta").to_empty(device="cpu")


def assign(model: nn.Module) -> nn.Module:
    head = model.get_submodule("0")
    head.weight = nn.Parameter(torch.randn(80, 64), requires_grad=False)
    return model


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


OTHER_TENSORS = [copy.deepcopy, reload, swap, move, assign, pickled]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", OTHER_TENSORS)
def test_a_weight_is_refused_whichever_tensor_it_is(change: Callable[[nn.Module], nn.Module], compiled: bool) -> None:
    model, x, targets = nn.Sequential(nn.Linear(64, 80, bias=False)), torch.randn(6, 64), torch.arange(6)
    add_lora(model, 4, 8.0)
    before = model.get_parameter("0.weight")
    model = change(model)
    head = model.get_submodule("0")
    loss = (lambda x, t: linear_cross_entropy(x, head.weight, t)) if compiled else None  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="only a call of the layer adds"):
        torch.compile(loss, backend="eager")(x, targets) if loss else linear_cross_entropy(x, head.weight, targets)  # type: ignore[arg-type]
    merge_lora(model)
    linear_cross_entropy(x, model.get_parameter("0.weight"), targets)
    if change in (reload, assign):  # no layer reads it any more
        linear_cross_entropy(x, before, targets)


@pytest.mark.parametrize("view", [Tensor.detach, lambda w: w.data, lambda w: w.t().t(), lambda w: w[:40]])
def test_a_view_of_such_a_weight_is_refused(view: Callable[[Tensor], Tensor]) -> None:
    head = nn.Linear(64, 80, bias=False)
    add_lora(nn.Sequential(head), 4, 8.0)
    with pytest.raises(ConfigError, match="only a call of the layer adds"):
        linear_cross_entropy(torch.randn(6, 64), view(head.weight), torch.arange(6))


def test_a_weight_that_is_called_with_others_is_refused() -> None:
    head, weight = nn.Linear(64, 80, bias=False), torch.randn(80, 64)
    add_lora(nn.Sequential(head), 4, 8.0)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, x: Tensor) -> Tensor:
            return linear_cross_entropy(x, self.head.weight, torch.arange(6))

    with pytest.raises(ConfigError, match="only a call of the layer adds"):
        torch.func.functional_call(Loss(), {"head.weight": weight}, torch.randn(6, 64))


def test_notes_keep_no_layer_alive() -> None:
    head = nn.Linear(64, 80, bias=False)
    add_lora(nn.Sequential(head), 4, 8.0)
    gone = weakref.ref(head.weight)
    gc.disable()
    try:
        del head
        assert gone() is None
    finally:
        gc.enable()


def test_compiled_code_refuses_such_a_loss_too() -> None:
    head = nn.Linear(64, 80, bias=False)
    add_lora(nn.Sequential(head), 4, 8.0)
    loss = torch.compile(lambda x, t: linear_cross_entropy(x, head.weight, t), backend="eager")
    with pytest.raises(ConfigError, match="only a call of the layer adds"):
        loss(torch.randn(6, 64), torch.arange(6))
