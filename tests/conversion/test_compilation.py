"""Blocks that are found and compiled in place, once per class: the same results, in every order with other calls."""

import copy
import inspect
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import octavo
from octavo.conversion.compilation import class_before, repeated_blocks
from octavo.errors import ConfigError, UnsupportedError
from octavo.nn import Linear

POLICY = octavo.Policy(min_gain=0.0)
compiled = partial(octavo.compile, backend="aot_eager", fullgraph=True)


class Block(nn.Module):
    def __init__(self, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(48, 32)
        self.layers = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 48)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def results(model: nn.Module, batch: int = 4) -> list[Tensor]:
    model.zero_grad()
    tokens = torch.arange(batch * 5).reshape(batch, 5) % 48
    y = model(tokens)
    y.float().square().mean().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(autouse=True)
def graphs() -> Callable[[], int]:
    """Return a function that gives the number of graphs compiled in this test."""
    torch._dynamo.reset()
    counters.clear()
    return lambda: counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("recipe", [None, "folded"])
def test_equal_blocks_are_one_graph_with_the_results_of_eager_mode(recipe, graphs):
    model = Model()
    if recipe:
        octavo.convert(model, recipe, policy=POLICY)
    names, expected = [*model.state_dict()], results(model)
    report = compiled(model)
    assert same(results(model), expected) and graphs() == 1
    assert report.model is model and [*report.blocks] == ["layers.0", "layers.1", "layers.2"]
    assert [*model.state_dict()] == names
    assert str(report) == "compiled: 3 x Block\nleft as they were, not repeated: embed, norm, head"
    report.remove()
    torch._dynamo.reset()
    counters.clear()
    assert same(results(model), expected) and graphs() == 0


def test_conversion_and_reversal_after_it(graphs):
    model = Model()
    expected_bf16 = results(model)
    report = compiled(model)
    octavo.convert(model, policy=POLICY)
    assert isinstance(model.layers[0].up, Linear) and graphs() == 0, "conversion compiles nothing"
    before = Model()
    octavo.convert(before, policy=POLICY)
    assert same(results(model), results(before)) and graphs() == 1
    octavo.revert(model)
    assert same(results(model), expected_bf16) and graphs() == 2
    assert repeated_blocks(before) == repeated_blocks(model) == [*report.blocks]


def test_a_copy_and_a_file_of_the_model_hold_it_uncompiled(graphs):
    model = Model()
    octavo.convert(model, policy=POLICY)
    expected = results(model)
    compiled(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(results(other), expected) and graphs() == 0
        assert [*octavo.compile(other, backend="aot_eager").blocks] == ["layers.0", "layers.1", "layers.2"]


def test_recomputation_before_and_after_it(graphs):
    for first in (octavo.recompute, compiled):
        model = Model()
        octavo.convert(model, policy=POLICY)
        expected = results(model)
        for step in (first, compiled if first is octavo.recompute else octavo.recompute):
            step(model)
        torch._dynamo.reset()
        assert same(results(model), expected)
    assert graphs() == 2  # one each


@pytest.mark.parametrize(("dynamic", "expected"), [(None, 2), (False, 3)])
def test_other_shapes_are_compiled_once_unless_each_is_to_be(dynamic, expected, graphs):
    model = Model()
    compiled(model, dynamic=dynamic)
    for batch in (4, 3, 2):
        results(model, batch)
    assert graphs() == expected


class Stages(nn.Module):
    """Stages of different widths, each of a block that changes the width and two that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(Block(width, 8 * width), Block(width), Block(width)) for width in (16, 32)
        )
        self.last = Block(16, 8)


class Shared(nn.Module):
    """One block that is used under two names, and a container of single layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.again = self.first
        self.heads = nn.ModuleDict({"a": nn.Linear(32, 4), "b": nn.Linear(32, 4)})


def with_experts() -> nn.Module:
    layer = nn.Module()
    layer.attention, layer.experts = nn.MultiheadAttention(32, 2), nn.ModuleList([Block() for _ in range(4)])
    return nn.ModuleList([copy.deepcopy(layer) for _ in range(2)])


def two_stacks() -> nn.Module:
    return nn.Transformer(32, 2, 2, 2, 64, batch_first=True)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Stages, [f"stages.{i}.{j}" for i in range(2) for j in range(3)] + ["last"]),
        (Shared, ["first", "second"]),
        (with_experts, ["0", "1"]),
        (two_stacks, [f"{side}coder.layers.{i}" for side in ("en", "de") for i in range(2)]),
        (lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))), ["0", "1"]),
        (lambda: Model(1), []),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), []),
    ],
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_the_outermost_modules_of_repeated_classes_are_the_blocks(make, expected):
    assert repeated_blocks(make()) == expected


def test_families_of_transformers():
    transformers = pytest.importorskip("transformers", reason="needs transformers (octavo[clients])")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 48, "num_key_value_heads": 1, "pad_token_id": 0}
    families: list[tuple[Any, Any, str]] = [
        (transformers.LlamaForCausalLM, transformers.LlamaConfig(**text), "model.layers"),
        (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**text, head_dim=16), "model.layers"),
        (transformers.MixtralForCausalLM, transformers.MixtralConfig(**text), "model.layers"),
        (transformers.GPT2Model, transformers.GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=2), "h"),
        (transformers.ViTModel, transformers.ViTConfig(**sizes), "layers"),
    ]
    for family, config, blocks in families:
        assert repeated_blocks(family(config)) == [f"{blocks}.0", f"{blocks}.1"]


def test_blocks_of_many_widths_are_all_compiled(graphs):
    """PyTorch gives up after eight graphs of one class."""
    widths = [8 * (1 + i // 2) for i in range(20)]
    blocks = nn.ModuleList(Block(32, width) for width in widths)
    assert len(compiled(blocks, backend="eager", fullgraph=False).blocks) == 20
    for block in blocks:
        block(torch.randn(4, 32))
    assert graphs() == (10 if "recompile_limit" in inspect.signature(torch.compile).parameters else 8)


def test_a_model_without_repeated_blocks_is_compiled_as_a_whole(graphs):
    model = Model(1)
    expected = results(model)
    report = compiled(model)
    assert same(results(model), expected) and graphs() == 1
    assert str(report) == "compiled: Model as a whole: it has no repeated blocks"


def test_blocks_by_pattern_and_those_compiled_already():
    model = Model()
    first = compiled(model, blocks="layers.1")
    second = compiled(model)
    assert [*first.blocks] == ["layers.1"] and [*second.blocks] == ["layers.0", "layers.2"]
    assert second.left["layers.1"] == "compiled already"
    second.remove()
    assert model.layers[1]._compiled_call_impl is not None, "it is the first call's"
    wrapped = nn.ModuleList([torch.compile(Block(), backend="eager") for _ in range(2)])
    assert set(compiled(wrapped).left.values()) == {"compiled already"}


def test_what_cannot_be_compiled_block_by_block_is_refused():
    with pytest.raises(ConfigError, match=r"the model is compiled already, with the blocks in it"):
        octavo.compile(torch.compile(Model(), backend="eager"))
    model = Model()
    model.compile(backend="eager")
    with pytest.raises(ConfigError, match=r"the model is compiled already, with the blocks in it"):
        octavo.compile(model)
    with pytest.raises(ConfigError, match=r"'layers.0.up' is inside 'layers.0'"):
        octavo.compile(Model(), blocks=["layers.*", "layers.*.up"])
    with pytest.raises(ConfigError, match="matches no module"):
        octavo.compile(Model(), blocks="blocks.*")
    partitioned = Model()
    partitioned.layers[0].up.weight.ds_id = 0
    with pytest.raises(UnsupportedError, match="ZeRO-3"):
        octavo.compile(partitioned)


def test_the_class_of_a_block_is_that_before_any_conversion():
    model = Model()
    octavo.convert(model, policy=POLICY)
    octavo.recompute(model)
    assert class_before(model.layers[0]) is Block and class_before(model.layers[0].up) is nn.Linear

    class Child(Block):
        parent = Model  # of the user's own: no class of Octavo

    assert class_before(Child()) is Child
