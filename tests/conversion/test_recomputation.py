"""Recomputed blocks: the same bits whatever is kept, in eager mode and in compiled code, and what they cost."""

import copy
import functools
import pickle

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.conversion.blocks import Wrapped, choose, unwrap, wrap
from octavo.conversion.recomputation import RecomputedBlock, price
from octavo.errors import ConfigError
from octavo.kernels.runtime import ledger
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.gpt import GPT
from octavo_bench.workloads import Stack

CONFIG = ModelConfig(vocab=64, dim=64, heads=4, kv_heads=2, layers=2, sequence=16, ffn=96)
KEEPS = ("products", 65, "nothing")
FP8 = octavo.Policy(activation_inputs="fp8", attention_output="fp8", norm_inputs="fp8")
STOCHASTIC = {"fprop": {"input": {"rounding": "stochastic"}}, "wgrad": {"input": {"granularity": "row"}}}
every_keep = pytest.mark.parametrize("keep", KEEPS)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 16, 64).bfloat16(), torch.randn(2, 16, 64).bfloat16()


def results(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(3)
    y = model(leaf)
    y.backward(dy)
    return [y.detach(), leaf.grad, *(p.grad for p in model.parameters())]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Branch(nn.Module):
    """Layers that share an input, a narrow product and a wide one: quick to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.wide = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wide(torch.cat([self.a(x).relu(), self.b(x).sigmoid()], -1)).tanh()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Branch()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def model_of(recipe=None, policy=None) -> nn.Module:
    torch.manual_seed(1)
    model = Stack(CONFIG).bfloat16()
    if recipe is not None:
        octavo.convert(model, recipe, policy=policy)
    return model


# --- what it computes -----------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@every_keep
@pytest.mark.parametrize(
    ("recipe", "policy"),
    [(None, None), ("folded", None), ("folded", FP8), ("block", None), ("delayed", None), (STOCHASTIC, None)],
    ids=["bf16", "folded", "fp8", "block", "delayed", "stochastic"],
)
def test_results_are_the_same_to_the_bit(keep, recipe, policy):
    x, dy = inputs()
    model = model_of(recipe, policy)
    plain = copy.deepcopy(model)
    octavo.recompute(model, keep)
    for _ in range(2):  # also with scales that an earlier step has left
        assert same(results(model, x, dy), results(plain, x, dy))


@every_keep
def test_weights_are_quantised_in_forward_and_in_its_recomputation(keep):
    x, dy = inputs()
    model = model_of("folded")
    octavo.recompute(model, keep)
    with ledger.record() as record:
        results(model, x, dy)
    assert record.weights == 2 * (2 * 7)


def test_another_keep_is_compiled_anew():
    x, dy = inputs()
    model = Branches().bfloat16()
    octavo.convert(model)
    want, sizes = results(model, x, dy), []
    for keep in ("nothing", 65, "products"):
        done = octavo.recompute(model, keep)
        compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
        kept: dict[int, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
        ):
            y = compiled(x.clone().requires_grad_())
        sizes.append(sum(t.untyped_storage().nbytes() for t in kept.values()))
        assert torch.equal(y, want[0]) and same(results(compiled, x, dy), want)
        done.remove()
    assert sizes[0] <= x.nbytes + sum(p.nbytes for p in model.parameters()) and sizes[0] <= sizes[1] < sizes[2]
    torch._dynamo.reset()


def test_no_gradients_no_checkpoint(monkeypatch):
    model, (x, _) = model_of(), inputs()
    want = model(x)
    octavo.recompute(model, "nothing")
    monkeypatch.setattr("octavo.conversion.recomputation.checkpoint", lambda *_, **__: pytest.fail("a checkpoint"))
    with torch.no_grad():
        assert torch.equal(model(x), want)


# --- what it costs --------------------------------------------------------------------------------------------------


def test_costs_fall_as_more_is_computed_again():
    model = GPT(ModelConfig(architecture="gpt", vocab=64, dim=64, heads=4, layers=2, sequence=16))
    tokens = torch.randint(64, (2, 16))
    done = octavo.recompute(model, "products")
    costs = done.costs(lambda: model(tokens), (65, "nothing"))
    assert [cost.keep for cost in costs] == ["everything", "products", "65", "nothing"]
    assert [cost.share for cost in costs[:2]] == [0, 0] and costs[-1].share == 1
    assert costs[0].bytes > costs[1].bytes > costs[2].bytes > costs[3].bytes == 2 * 16 * 64 * 4
    assert costs[2].flops == 2 * 32 * (64 * (192 + 64 + 256) + 16 * 64)  # all but w2, which sums over 256
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ConfigError, match="did not call the block"):
        done.costs(lambda: None)


@pytest.mark.parametrize("recipe", ["folded", "block", "mxfp8"])
def test_results_are_kept_as_they_are_rounded_whatever_kernel_computes_them(recipe):
    x, _ = inputs()
    model, plain = model_of(recipe), model_of()
    found, want = (octavo.recompute(each).costs(lambda each=each: each(x))[1] for each in (model, plain))
    assert (found.keep, found.bytes, found.flops) == ("products", want.bytes, 0)


@pytest.mark.parametrize(
    ("operation", "args", "want"),
    [
        (torch.ops.aten.mm.default, (torch.empty(3, 5), torch.empty(5, 7)), 5),
        (torch.ops.aten.addmm.default, (torch.empty(7), torch.empty(3, 5), torch.empty(5, 7)), 5),
        (torch.ops.aten.convolution.default, (torch.empty(1, 4, 8, 8), torch.empty(6, 4, 3, 3)), 36),
        (torch.ops.octavo.attention.default, (torch.empty(2, 9, 4, 8), torch.empty(2, 9, 2, 8)), 9),
        (torch.ops.aten.mul.Tensor, (torch.empty(3, 5), torch.empty(3, 5)), 0),
        (torch.ops.octavo.quantize_pair.default, ([torch.empty(3, 5)],), 0),
    ],
)
def test_prices(operation, args, want):
    assert price(operation, args) == want


def test_every_product_of_the_library_has_a_price():
    a, ops = torch.empty(2, 3, 5), torch.ops.octavo
    assert price(ops.rounded_product.default, (torch.empty(3, 5), torch.empty(5, 7), torch.bfloat16)) == 5
    assert all(
        price(operation, (a, a)) == 5 for operation in (ops.gemm.default, ops.bmm.default, ops.grouped_gemm.default)
    )


# --- how it is put on and taken off ---------------------------------------------------------------------------------


def test_names_stay_and_it_comes_off():
    model = model_of("folded")
    names, before = list(model.state_dict()), type(model.layers[0])
    done = octavo.recompute(model, "nothing")
    assert done.blocks == ["layers.0", "layers.1"] and "2 blocks: nothing but their inputs saved" in str(done)
    assert isinstance(model.layers[0], before) and isinstance(model.layers[0], RecomputedBlock)
    assert list(model.state_dict()) == names
    with pytest.raises(ConfigError, match="already"):
        octavo.recompute(model)
    done.remove()
    assert type(model.layers[0]) is before and "checkpoint_contexts" not in vars(model.layers[0])
    done.remove()  # once more does nothing


def test_copies_and_files_hold_the_block_as_it_was():
    block = model_of().layers[0]
    plain = type(block)
    wrap(block, RecomputedBlock, recompute_keeps="nothing", checkpoint_contexts=None)
    other = pickle.loads(pickle.dumps(block))
    assert type(other) is plain and "recompute_keeps" not in vars(other)
    assert type(copy.deepcopy(block)) is plain and isinstance(block, RecomputedBlock)
    unwrap(block, RecomputedBlock)


def test_copies_and_files_leave_out_what_the_block_itself_leaves_out():
    model = Branches()
    octavo.recompute(model, "nothing")
    model.layers[0].compile(backend="eager")  # the call that it makes belongs to this block
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    x = torch.randn(2, 64)
    assert torch.equal(other(x), x)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
    torch._dynamo.reset()


@pytest.mark.parametrize("keep", ["everything", 0, -1, True, None])
def test_an_unknown_keep(keep):
    with pytest.raises(ConfigError, match="keep = "):
        octavo.recompute(model_of(), keep)


def test_patterns():
    model = model_of()
    assert choose(model, None) == ["layers.0", "layers.1"] == choose(model, "layers.*")
    assert choose(model, ["layers.1", "layers.*"]) == ["layers.1", "layers.0"]
    assert choose(model, "layers.*.feed_forward") == ["layers.0.feed_forward", "layers.1.feed_forward"]
    with pytest.raises(ConfigError, match=r"'layer.\*' matches no module"):
        choose(model, "layer.*")
    with pytest.raises(ConfigError, match=r"no nn.ModuleList"):
        choose(nn.Linear(2, 2), None)


def test_layers_that_share_an_input_are_still_found():
    model = model_of()
    octavo.recompute(model, "nothing", blocks="layers.*.attention")
    plan = octavo.convert(model)
    assert sum(structure.kind == "shared" for structure in plan.structures) == 2


@pytest.mark.parametrize("wrapping", [octavo.recompute, functools.partial(octavo.offload, keep_last=0)])
@pytest.mark.parametrize("block", ["feed_forward", "ffn_norm", "attention.wq"])
def test_a_block_that_is_itself_converted_cannot_change_while_it_is_wrapped(wrapping, block):
    """The wrapper would be removed instead of the FP8 class, or the fused computation would run in its place."""
    model, policy, (x, dy) = model_of(), octavo.Policy(memory="low"), inputs()
    part, plain = model.layers[0].get_submodule(block), type(model.layers[0].get_submodule(block))
    wrapped = wrapping(model, blocks=f"layers.*.{block}")
    with pytest.raises(ConfigError, match=rf"layers\.0\.{block} is recomputed or offloaded as a block of its own"):
        octavo.convert(model, policy=policy)
    assert octavo.revert(model) == 0 and isinstance(part, Wrapped)
    wrapped.remove()
    octavo.convert(model, policy=policy)
    converted = type(part)
    wrapped = wrapping(model, blocks=f"layers.*.{block}")
    want = results(model, x, dy)
    for change in (octavo.revert, octavo.convert):
        with pytest.raises(ConfigError, match="as a block of its own"):
            change(model)
        assert isinstance(part, Wrapped) and same(results(model, x, dy), want)
    wrapped.remove()
    assert type(part) is converted
    octavo.revert(model)
    assert type(part) is plain


def test_a_wrapped_layer_that_stays_in_bf16_stops_nothing():
    model = model_of()
    octavo.recompute(model, blocks="layers.*.attention.wq")
    octavo.convert(model, policy=octavo.Policy(keep={"*.wq": "mine"}))
    assert isinstance(model.layers[0].attention.wq, Wrapped) and octavo.revert(model) == 12
