"""The fused experts against a loop over experts, bit for bit, and against float64."""

import copy
import io
import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from octavo.errors import ConfigError
from octavo.kernels import record
from octavo.kernels.experts import route
from octavo.kernels.gemm import KERNELS, choose
from octavo.nn import GroupedLinear, reuse_weight_codes
from octavo.nn.experts import ExpertOptions, ExpertRoles, adopt, experts, unfused_reason
from octavo.nn.functional import Quantizer, linear
from octavo.nn.mlp import mlp
from octavo.nn.telemetry import Telemetry
from octavo.numerics import block_for, rotate, sqnr_db
from octavo.recipes import load

E, D, H = 5, 48, 32


class Plain(nn.Module):
    """Experts as a reader would write them."""

    def __init__(self, experts=E, width=D, hidden=H):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(experts, 2 * hidden, width, generator=generator) / 7)
        self.down = nn.Parameter(torch.randn(experts, width, hidden, generator=generator) / 6)

    def forward(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(len(self.up)):
            tokens, places = torch.where(ids == e)
            gate, up = (x[tokens] @ self.up[e].T).chunk(2, dim=-1)
            y = y.index_add(0, tokens, ((F.silu(gate) * up) @ self.down[e].T) * weights[tokens, places, None])
        return y


ROLES = ExpertRoles(("up",), "down", "silu")


def fp8(module=None, recipe="folded", inputs="bf16"):
    module = copy.deepcopy(module) if module is not None else Plain()
    adopt(module, ROLES, load(recipe), load(recipe), inputs)
    return module


def routed(tokens, each=2, seed=0):
    torch.manual_seed(seed)
    weights, ids = torch.randn(tokens, E).softmax(1).topk(each)
    return torch.randn(tokens, D, requires_grad=True), ids, weights.detach().requires_grad_()


def gradients(module, x, ids, weights, dy=None):
    x, weights = x.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
    y = module(x, ids, weights)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)) if dy is None else dy
    y.backward(dy.to(y.dtype))
    found = [y.detach(), x.grad, weights.grad, *(parameter.grad for parameter in module.parameters())]
    module.zero_grad()
    return found


@pytest.mark.parametrize("inputs", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("recipe", ["folded", "rotated"])
def test_one_expert_per_token_is_a_loop_of_mlps(recipe, tokens, inputs, monkeypatch):
    monkeypatch.setitem(choose.__globals__, "KERNELS", KERNELS[-1:])  # PyTorch's GEMM sums in another order
    monkeypatch.setitem(choose.__globals__, "_choices", {})
    module, (x, ids, _) = fp8(recipe=recipe, inputs=inputs), routed(tokens, 1)
    weights, recipe = torch.ones(tokens, 1), load(recipe)
    dy = torch.randn(tokens, D)
    y, dx, _, d_up, d_down = gradients(module, x, ids, weights, dy)
    quantizer = Quantizer(recipe, torch.float32)
    for e in range(E):
        mine = (ids[:, 0] == e).nonzero()[:, 0]
        parts = [*(part.detach().requires_grad_() for part in module.up[e].chunk(2))]
        down, own = module.down[e].detach().requires_grad_(), x.detach()[mine].requires_grad_()
        alone = mlp(own, [*parts, down], "silu", (quantizer, quantizer), activation_inputs=inputs)
        alone.backward(dy[mine])
        assert torch.equal(y[mine], alone) and torch.equal(dx[mine], own.grad)
        assert torch.equal(d_up[e], torch.cat([part.grad for part in parts])) and torch.equal(d_down[e], down.grad)


@pytest.mark.parametrize("recipe", ["folded", "folded_fast", "rowwise", "rotated"])
@pytest.mark.parametrize("inputs", ["bf16", "fp8"])
def test_against_float64(recipe, inputs):
    plain, given = Plain(), routed(129)
    exact = gradients(copy.deepcopy(plain).double(), *(t.double() if t.is_floating_point() else t for t in given))
    found = gradients(fp8(plain, recipe, inputs), *given)
    assert min(sqnr_db(a, b) for a, b in zip(exact, found, strict=True)) > 22.0


@pytest.mark.parametrize("tokens", [0, 1, 2, 15, 16, 17])
def test_every_number_of_tokens(tokens):
    plain, given = Plain(), routed(tokens, 3)
    wide, found = gradients(plain, *given), gradients(fp8(plain), *given)
    assert [t.shape for t in wide] == [t.shape for t in found]
    assert all(sqnr_db(a, b) > 18.0 for a, b in zip(wide, found, strict=True) if a.any())
    idle = sorted(set(range(E)) - set(given[1].flatten().tolist()))
    assert not found[3][idle].any() and not found[4][idle].any()


def test_it_gives_the_same_bits_each_time():
    module, given = fp8(), routed(70, 3)
    first, second = (gradients(module, *given) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_token_does_not_depend_on_others():
    module, (x, ids, weights) = fp8(), routed(40)
    whole, half = (module(x[:n], ids[:n], weights[:n]) for n in (40, 11))
    torch.testing.assert_close(whole[:11], half, rtol=1e-6, atol=1e-6)  # PyTorch's GEMM sums by blocks of rows


@pytest.mark.parametrize("recipe", ["folded", "rotated"])
def test_what_is_kept_for_backward(recipe):
    module, (x, ids, weights) = fp8(recipe=recipe), routed(64, 4)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(x.bfloat16(), ids, weights)
    mine = [t for t in kept if t.shape[:1] not in ((E,), (E * 2 * H,))]
    assert all(t.dtype != torch.int8 for t in kept)
    codes = [t for t in mine if t.dtype == torch.float8_e4m3fn and t.dim() == 2]
    assert [tuple(t.shape) for t in codes] == [(64, D)]
    assert [tuple(t.shape) for t in mine if t.dtype == torch.bfloat16] == [(64 * 4, 2 * H)]
    assert sum(t.nbytes for t in mine if t.element_size() == 4) <= 64 * (4 + 4 * 20) + 4 * E


def test_weights_are_quantised_once_and_nothing_falls_back():
    module, given = fp8(), routed(9)
    with record() as ledger:
        gradients(module, *given)
    assert ledger.weights == 2 and not ledger.fallbacks


@pytest.mark.parametrize(
    ("recipe", "inputs"),
    [("folded", "fp8"), ("rotated", "bf16"), pytest.param("folded", "bf16", marks=pytest.mark.slow)],
)
def test_compiled_code_computes_the_same(recipe, inputs):
    module, given = fp8(recipe=recipe, inputs=inputs), routed(21)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, ids, weights = given
    twins = [t.detach().clone().requires_grad_() for t in (x, weights)]
    y = compiled(twins[0], ids, twins[1])
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    found = [y, twins[0].grad, twins[1].grad, module.up.grad.clone(), module.down.grad.clone()]
    module.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(module, *given), strict=True))


def test_compiled_code_makes_and_copies_nothing_twice():
    """The partitioner computes no forward again, and what an operator reads lies as it was made."""
    graphs = []

    def keep(graph, _):
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    x, ids, weights = routed(21)
    torch.compile(fp8(), fullgraph=True, backend=backend)(x, ids, weights).sum().backward()
    own = [{name.split(".")[1]: n for name, n in graph.items() if name.startswith("octavo")} for graph in graphs]
    assert own[0] == {"quantize_tokens": 1, "quantize_stack": 2, "grouped_gemm": 2, "activation": 1, "combine_rows": 1}
    passes = {"quantize_groups": 1, "expert_activation_backward": 1, "transpose_groups": 1, "combine_rows": 1}
    assert own[1] == passes | {"transpose": 2, "grouped_gemm": 2, "grouped_wgrad": 2}
    assert not {"aten.clone.default", "aten.copy.default"} & {name for graph in graphs for name in graph}


def test_autocast_and_layouts_of_tokens():
    module, (x, ids, weights) = fp8(), routed(12)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x.view(3, 4, D), ids, weights=weights)
    assert y.shape == (3, 4, D) and y.dtype == torch.float32
    y.sum().backward()
    assert x.grad.dtype == module.up.grad.dtype == torch.float32


def test_high_precision_and_back():
    plain, given = Plain(), routed(30)
    module = fp8(plain)
    for product in module.products:
        product.enabled = False
    for a, b in zip(gradients(module, *given), gradients(plain, *given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    names = list(plain.state_dict())
    assert list(module.state_dict()) == names and [name for name, _ in module.named_parameters()] == names
    loaded = torch.load(_saved(copy.deepcopy(module)), weights_only=False)
    assert torch.equal(loaded(*given), module(*given))
    module.release()
    assert type(module) is Plain and not list(module.children())


@pytest.mark.parametrize("recipe", ["folded", "rotated"])
def test_telemetry_of_both_products(recipe):
    module, given = fp8(recipe=recipe), routed(8)  # 16 rows: each is sampled
    expected = gradients(module, *given)
    with Telemetry(module) as telemetry:
        found = gradients(module, *given)
        telemetry.step()
        telemetry.wait()
        _, values = telemetry.snapshot()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    rows = {(row.layer, row.role): value for row, value in zip(telemetry.rows, values, strict=True)}
    assert {layer for layer, _ in rows} == {"gate_up_gemm", "down_gemm"} and len(rows) == 8
    x, ids, _ = given
    hidden = torch.cat([_hidden(x[(ids == e).any(1)], module.up[e], recipe) for e in range(E)])
    read = {("gate_up_gemm", "input"): x, ("down_gemm", "input"): hidden}
    read["gate_up_gemm", "weight"] = module.up.flatten(0, 1)
    for key, values in read.items():
        block = block_for(values.shape[1], 256) if recipe == "rotated" else 1
        assert rows[key][0] == pytest.approx(rotate(values.detach(), block).abs().max().item(), rel=1e-6)


@pytest.mark.parametrize("inputs", ["bf16", "fp8"])
def test_telemetry_of_a_gradient_has_the_routing_weights_in_it(inputs):
    module, (x, ids, weights) = fp8(inputs=inputs), routed(40)
    dy, found = torch.randn(40, D), []
    for factor in (1.0, 2.0**-8):
        with Telemetry(module) as telemetry:
            gradients(module, x, ids, weights * factor, dy)
            telemetry.step()
            telemetry.wait()
            _, values = telemetry.snapshot()
        found.append({(row.layer, row.role): value for row, value in zip(telemetry.rows, values, strict=True)})
    for role, factor in ((("gate_up_gemm", "grad_output"), 2.0**-8), (("down_gemm", "grad_output"), 1.0)):
        assert found[1][role][0] == found[0][role][0] * factor > 0  # amax


def test_what_does_not_fit():
    options, x = ExpertOptions("silu", load("folded"), torch.float32, False), torch.randn(4, D)
    stacks, routing = (torch.randn(E, 2 * H, D), torch.randn(E, D, H)), route(torch.zeros(5, 1).long(), E)
    with pytest.raises(ConfigError, match=r"as many routed tokens, got \(4, 48\) and 5 tokens"):
        experts(x, None, stacks, routing, options)
    codes = stacks[0], stacks[1].to(torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match="float8_e4m3fn: FP8 products take"):
        experts(x, None, codes, route(torch.zeros(4, 1).long(), E), options)
    with pytest.raises(TypeError, match="takes the arguments x, ids, weights, got 1 by position and wights by name"):
        fp8()(x, wights=torch.ones(4, 1))


SKIPPED = [0, 1, 5, 30]
"""Slots of `skipping` without an expert; 0 and 1 are all slots of one token."""


def skipping(tokens, experts, no_expert):
    """Routed tokens, some slots of which have the id `no_expert`."""
    torch.manual_seed(0)
    ids = torch.rand(tokens, experts).topk(2).indices
    ids.view(-1)[SKIPPED] = no_expert
    return torch.randn(tokens, D), ids, torch.rand(tokens, 2)


SLOTS = list(itertools.product([E, 255, 256, 257], ["folded", "rowwise"], ["eager", "compiled"]))
# Compiled code, too, product by product; fused it is as in `test_compiled_code_computes_the_same`.
QUICK = [
    (E, "rowwise", "compiled"),
    *((n, "folded", "eager") for n in (E, 255, 256, 257)),
    (257, "rowwise", "eager"),
]


@pytest.mark.parametrize(
    ("experts", "recipe", "run"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in SLOTS],
)
def test_a_slot_without_an_expert_adds_nothing_anywhere(experts, recipe, run):
    plain, (x, ids, weights) = Plain(experts), skipping(33, experts, experts)
    module = fp8(plain, recipe)
    if run == "compiled":
        torch._dynamo.reset()
        module.compile(backend="aot_eager", fullgraph=True)
    found, wide = gradients(module, x, ids, weights), gradients(plain, x, ids, weights)  # a loop leaves it out
    assert min(sqnr_db(a, b) for a, b in zip(wide, found, strict=True)) > 18.0
    assert not found[0][0].any() and not found[1][0].any()
    assert not found[2].view(-1)[SKIPPED].any() and found[2].count_nonzero() == 66 - len(SKIPPED)
    idle = sorted(set(range(experts)) - set(ids.flatten().tolist()))
    assert not found[3][idle].any() and not found[4][idle].any()


@pytest.mark.parametrize("recipe", ["folded", "rowwise"])
@pytest.mark.parametrize("overflows", [0, E - 1])
def test_a_slot_without_an_expert_is_not_computed_by_one_that_its_token_does_not_have(recipe, overflows):
    x, ids, weights = skipping(33, E, E)
    ids[ids == overflows] = 1
    ids[0, 0] = 1  # in SKIPPED are all slots of this token
    module = fp8(recipe=recipe)
    module.up.data[overflows] = 1e30
    assert all(found.isfinite().all() for found in gradients(module, x.abs(), ids, weights))


@pytest.mark.parametrize("recipe", [pytest.param("folded", marks=pytest.mark.slow), "rowwise"])
@torch.no_grad()
def test_an_id_of_no_expert_is_an_error_that_names_it(recipe):
    torch._dynamo.reset()
    module = fp8(recipe=recipe)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)  # once: ids are values
    for wrong in (-1, E + 1, 256, 261, 1 << 16, (1 << 32) + 1):
        given = skipping(33, E, wrong)
        with pytest.raises(ConfigError, match=rf"routed to expert {wrong}, but the ids of 5 experts are 0 to 4"):
            module(*given)
        with pytest.raises(ConfigError, match=r"tokens, 66, got 62\. If they come .* out of range"):
            compiled(*given)


@pytest.mark.parametrize("experts", [1, 255, 256, 257, (1 << 15) - 1, 1 << 15, (1 << 16) + 2])
def test_rows_are_sorted_for_any_number_of_experts(experts):
    ids = torch.tensor([[experts - 1, 0], [experts // 2, experts - 1]])
    source, place, ends = route(ids, experts)
    order = torch.sort(ids.flatten(), stable=True).indices
    assert torch.equal(source, (order // 2).int()) and torch.equal(ids.flatten()[order[place.long()]], ids)
    assert torch.equal(ends, torch.bincount(ids.flatten(), minlength=experts).cumsum(0).int())


def test_scales_that_backward_cannot_use_again_are_not_fused():
    folded = load("folded")
    for scaling, expected in (("power_of_two", None), ("engine", None), ("float32", "FP32 scales")):
        gemms = {
            gemm: replace(each, **{role: replace(getattr(each, role), scaling=scaling) for role in roles})
            for gemm, each, roles in (
                ("fprop", folded.fprop, ("input", "weight")),
                ("dgrad", folded.dgrad, ("weight",)),
                ("wgrad", folded.wgrad, ("input",)),
            )
        }
        recipe = replace(folded, **gemms)
        reason = unfused_reason(ROLES, recipe, recipe)
        assert reason is expected or expected in reason
    rotated = load("rotated")  # FP32 scales in fprop alone
    assert unfused_reason(ROLES, rotated, rotated) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("recipe", "inputs"), [("folded", "bf16"), ("folded", "fp8"), ("rotated", "bf16")])
def test_on_a_gpu_it_computes_what_the_cpu_computes(recipe, inputs):
    plain, (x, ids, weights) = Plain(width=256, hidden=128).bfloat16(), routed(333, 3)
    x = torch.randn(333, 256).bfloat16()
    module, twin = fp8(plain, recipe, inputs), fp8(plain, recipe, inputs).cuda()
    dy = torch.randn(333, 256)
    with record() as ledger:
        found = gradients(twin, x.cuda(), ids.cuda(), weights.cuda(), dy.cuda())
    assert not ledger.fallbacks and set(ledger.gemms) == {"grouped_gemm"}
    for ours, theirs in zip(gradients(module, x, ids, weights, dy), found, strict=True):
        assert sqnr_db(ours, theirs.cpu()) > 38


def _saved(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return buffer


def _hidden(x, up, recipe):
    gate, up = linear(x, up, None, load(recipe)).detach().chunk(2, dim=-1)
    return F.silu(gate) * up


class _Both(nn.Module):
    """Adopted experts and a grouped linear layer."""

    def __init__(self, recipe):
        super().__init__()
        torch.manual_seed(0)
        self.experts, self.grouped = fp8(recipe=recipe), GroupedLinear(1, D, D, recipe=recipe)

    def forward(self, x, ids, weights):
        return self.grouped(self.experts(x, ids, weights), torch.tensor([len(x)], dtype=torch.int32))


@pytest.mark.parametrize(
    ("recipe", "mode"),  # fused, product by product, two sets of codes
    [
        ("folded", "eager"),
        ("rowwise", "eager"),
        ("folded", "compiled"),
        ("rotated", "eager"),
        pytest.param("rotated", "compiled", marks=pytest.mark.slow),
        pytest.param("rowwise", "compiled", marks=pytest.mark.slow),
    ],
)
def test_reused_codes_give_the_same_results_and_are_made_once(recipe, mode):
    torch._dynamo.reset()
    model = _Both(recipe)
    call = model if mode == "eager" else torch.compile(model, backend="aot_eager")

    def results():
        model.zero_grad()
        x, ids, weights = routed(40)
        y = call(x, ids, weights)
        y.square().sum().backward()
        return y, x.grad, weights.grad, *(p.grad for p in model.parameters())

    expected = results()
    products = *model.experts.products, model.grouped
    with record() as ledger, reuse_weight_codes(model):
        made = ledger.weights
        assert made == 3
        assert all(layer.weight_codes is not None for layer in products)
        assert all(torch.equal(a, b) for a, b in zip(results(), expected, strict=True))
        assert ledger.weights == made, "no weight is quantised for fprop again"
        assert copy.deepcopy(model).grouped.weight_codes is None
    assert all(layer.weight_codes is None for layer in products)
    model.grouped.weight.data.mul_(1.5)
    assert not torch.equal(results()[0], expected[0])
