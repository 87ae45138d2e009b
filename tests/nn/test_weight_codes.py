"""Weight codes: those of the specification, and in each forward those of the values that the weight has then."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo import Policy, kernels
from octavo.errors import UnsupportedError
from octavo.kernels import QuantSpec
from octavo.kernels.quantize import quantize_stack
from octavo.nn import Conv2d, GroupedLinear, Linear, reuse_weight_codes
from octavo.nn.cross_entropy import linear_cross_entropy
from octavo.nn.functional import Quantizer, linears
from octavo.nn.weight_codes import (
    join_rows,
    multiply,
    quantize_weights,
    quantize_weights_transposed,
    split_rows,
)
from octavo.numerics import PER_ROW, Quantized, dequantize, quantize
from octavo.recipes import load
from writes import (
    ALL_FP8_WAYS,
    EAGER_WAYS,
    WAYS,
    fault_in,
    fault_in_fp8,
    fault_of,
    fault_of_fp8,
    fp8_net,
    net,
    results,
)

ROW = QuantSpec("e4m3", "row", "power_of_two")
TENSOR = QuantSpec("e4m3", "tensor", "float32")
TILE = QuantSpec("e4m3", "1x128", "power_of_two")
BLOCK = QuantSpec("e4m3", "128x128", "power_of_two")
TARGETS = [ROW, TENSOR, TILE, BLOCK, QuantSpec("e5m2", "row", "float32"), QuantSpec("e4m3", "1x32", "power_of_two")]
every_target = pytest.mark.parametrize("target", TARGETS, ids=str)


def parameter(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter((torch.randn(rows, cols) * torch.logspace(-3, 1, rows)[:, None]).to(dtype))


def specified(x: Tensor, target: QuantSpec) -> Quantized:
    return quantize(x.detach(), target.fmt, target.tile, target.scaling)


def same(a: Quantized, b: Quantized) -> bool:
    codes = torch.equal(a.codes.view(torch.uint8), b.codes.contiguous().view(torch.uint8))
    return codes and torch.equal(a.scale, b.scale) and a.granularity == b.granularity


# --- the specification ----------------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@every_target
@pytest.mark.parametrize("rows", [(40,), (256, 128, 130), (128, 100, 28)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_those_of_the_stack_by_the_specification(target, rows, dtype):
    stack = [parameter(n, 136, dtype) for n in rows]
    whole = torch.cat([w.detach() for w in stack])
    codes = quantize_weights(stack, target)
    assert same(codes.stack, specified(whole, target)) and codes.rows == rows
    transposed = quantize_weights_transposed(stack, target)
    assert same(transposed, specified(whole.t(), target))
    for made in (codes.stack, transposed):
        assert made.codes.is_contiguous() and not made.codes.requires_grad


def test_weights_of_different_dtypes_are_quantised_without_rounding_any():
    stack = [parameter(32, 64), parameter(32, 64, torch.bfloat16)]
    whole = torch.cat([w.detach().float() for w in stack])
    assert same(quantize_weights(stack, ROW).stack, specified(whole, ROW))
    assert same(quantize_weights_transposed(stack, ROW), specified(whole.t(), ROW))


def test_kernels_of_a_convolution_are_matrices_with_channels_last():
    kernel = nn.Parameter(torch.randn(24, 8, 3, 3))
    matrix = kernel.detach().permute(0, 2, 3, 1).reshape(24, 72)
    assert same(quantize_weights([kernel], ROW).stack, specified(matrix, ROW))
    assert same(quantize_weights_transposed([kernel], ROW), specified(matrix.t(), ROW))


@pytest.mark.parametrize("count", [1, 2])
def test_random_rounding_draws_a_seed_per_call(count):
    target, stack = ROW._replace(rounding="stochastic"), [parameter(32, 64) for _ in range(count)]
    whole = torch.cat([w.detach() for w in stack])
    for make, matrix in ((lambda: quantize_weights(stack, target).stack, whole),
                         (lambda: quantize_weights_transposed(stack, target), whole.t())):  # fmt: skip
        state = torch.get_rng_state()
        first, second = make(), make()
        assert not same(first, second)
        torch.set_rng_state(state)
        assert same(make(), first)
        torch.set_rng_state(state)
        assert same(kernels.quantize_matrix(matrix, target), first)


def test_every_call_counts_the_weights_that_it_quantises():
    a, b = parameter(32, 64), parameter(32, 64)
    with kernels.record() as ledger:
        quantize_weights([a], ROW)
        quantize_weights([a, b], ROW)
    assert ledger.weights == 3


@every_target
@pytest.mark.parametrize("rows", [(48,), (128, 256), (40, 128, 24)], ids=str)
def test_rows_of_a_stack_are_those_of_each_weight(target, rows):
    stack = [parameter(n, 136) for n in rows]
    codes = quantize_weights(stack, target)
    parts = split_rows(codes.stack, rows)
    straddled = target == BLOCK and rows == (40, 128, 24)
    assert (parts is None) == (codes.parts() is None) == straddled
    if parts is not None:
        assert same(join_rows(parts), codes.stack)
        for part, n, y in zip(parts, rows, dequantize(codes.stack).split(rows), strict=True):
            assert part.codes.shape == (n, 136) and torch.equal(dequantize(part), y)
    if parts is not None and target != TENSOR:
        assert all(same(part, specified(w, target)) for part, w in zip(parts, stack, strict=True))


@every_target
@pytest.mark.parametrize("rows", [(48,), (128, 256), (40, 128, 24)], ids=str)
def test_each_weight_gets_its_own_columns(target, rows):
    stack = [parameter(n, 136) for n in rows]
    x = kernels.quantize(torch.randn(33, 136), *(TILE if "128" in target.granularity else target)[:3])
    outputs = multiply(x, quantize_weights(stack, target), torch.float32, "slow")
    whole = dequantize(specified(torch.cat([w.detach() for w in stack]), target)).double()
    expected = (dequantize(x).double() @ whole.t()).float().split(rows, dim=1)
    for y, z in zip(outputs, expected, strict=True):
        assert y.is_contiguous()
        torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 2])
def test_outputs_of_layers_that_are_computed_together_can_be_written_to(tokens):
    weights = [parameter(64, 128) for _ in range(3)]  # a tile of `block` spans two of them
    quantizer = Quantizer(load("block"), torch.float32)
    q, k, v = linears(torch.randn(tokens, 128), weights, [None] * 3, quantizer)
    kept = k.detach().clone()
    (q.mul_(0.125) * k + v.relu_()).sum().backward()
    assert torch.equal(k, kept) and all(weight.grad.any() for weight in weights)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["folded", "tensorwise", "block"])
@pytest.mark.parametrize("features", [48, 40])  # 40: PyTorch's products are padded
def test_outputs_on_a_gpu_can_be_written_to(recipe, features):
    layer = Linear(128, features, bias=False, device="cuda", dtype=torch.bfloat16, recipe=recipe)
    for tokens in (1, 2, 128) * 4:  # a recording is replayed from the third time on
        x = torch.randn(tokens, 128, device="cuda", dtype=torch.bfloat16)
        layer(x).mul_(2).sum().backward()
    assert layer.weight.grad.any()


@pytest.mark.parametrize("target", [ROW, BLOCK], ids=str)
def test_a_stack_equals_separate_weights_where_no_tile_lies_across(target):
    stack = [parameter(n, 136) for n in (128, 256, 128)]
    x = kernels.quantize(torch.randn(33, 136), *(TILE if target == BLOCK else target)[:3])
    together = multiply(x, quantize_weights(stack, target), torch.bfloat16, "slow")
    alone = [multiply(x, quantize_weights([w], target), torch.bfloat16, "slow")[0] for w in stack]
    assert all(torch.equal(y, z) for y, z in zip(together, alone, strict=True))


@every_target
@pytest.mark.parametrize("count", [1, 3])
def test_compilers_are_told_the_true_shapes(target, count):
    stack = [parameter(n, 136).detach() for n in (48, 24, 130)[:count]]
    arguments = quantize_stack.encode(stack, target)
    torch.library.opcheck(quantize_stack.operator, arguments, test_utils="test_faketensor")


def test_compiled_code_makes_the_same_codes():
    stack = [parameter(48, 64).detach(), parameter(24, 64).detach()]
    compiled = torch.compile(lambda *w: tuple(quantize_weights(w, ROW).stack[:2]), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with kernels.record() as ledger:
            assert same(Quantized(*compiled(*stack), PER_ROW), specified(torch.cat(stack), ROW))
        assert ledger.weights == 2
        stack[1].mul_(3.0)
    torch._dynamo.reset()


# --- every way to write a weight ------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("recipe", ["folded", "rowwise"])
@pytest.mark.parametrize("way", WAYS | EAGER_WAYS)
def test_a_write_to_a_weight_is_seen_by_the_next_forward(recipe, way):
    """dgrad of the one recipe reads the codes that forward has made, that of the other quantises the weight itself."""
    assert fault_of(way, recipe) == ""


@pytest.mark.parametrize("way", ALL_FP8_WAYS)
def test_a_write_to_an_fp8_weight_is_seen_by_the_next_forward(way):
    assert fault_of_fp8(way) == ""


@pytest.mark.parametrize(
    ("made", "ways", "fault"),
    [(partial(net, "folded"), WAYS, partial(fault_in, recipe="folded")), (fp8_net, ALL_FP8_WAYS, fault_in_fp8)],
    ids=["codes of weights", "FP8 weights"],
)
def test_one_compiled_model_sees_every_write(made, ways, fault):
    """By graphs that were compiled before a write, or are compiled again because of it."""
    torch._dynamo.reset()
    model = made()
    call = torch.compile(model, backend="aot_eager")
    for seed, way in enumerate(ways):
        torch.manual_seed(seed)  # `net` sets it: the next way would write what is there
        assert fault(way, model=model, call=call) == "", way
    torch._dynamo.reset()


def test_a_write_that_nobody_sees_is_noticed(monkeypatch):
    from octavo.nn import functional

    kept = {}
    make = functional.read_weights
    monkeypatch.setattr(
        functional, "read_weights", lambda ws, *rest: kept.setdefault(ws[0].data_ptr(), make(ws, *rest))
    )
    assert fault_of("copy_", "rowwise") != ""


def gathered_for_each_call(model: nn.Module) -> nn.Module:
    """Hold weights as DeepSpeed's ZeRO-3 does: empty, but while their layer computes, and all in one memory."""
    memory = torch.empty(4096)

    def gather(layer: nn.Module) -> None:
        start = 0
        for name, p in layer.named_parameters(recurse=False):
            p.data = memory[start : start + layer.whole[name].numel()].view_as(layer.whole[name])
            p.data.copy_(layer.whole[name])
            start += p.numel()

    def release(layer: nn.Module) -> None:
        for p in layer.parameters(recurse=False):
            p.data = torch.empty(0)

    for layer in model.children():
        layer.whole = {name: p.detach().clone() for name, p in layer.named_parameters(recurse=False)}
        layer.register_forward_pre_hook(lambda layer, _: gather(layer))
        layer.register_forward_hook(lambda layer, *_: release(layer))
        layer.register_full_backward_pre_hook(lambda layer, _: gather(layer))
        release(layer)
    return model


def test_a_scale_in_common_with_weights_that_are_not_there_is_refused():
    model = gathered_for_each_call(net("tensorwise"))
    with pytest.raises(UnsupportedError, match=r"has scales in common with the layers .* not here"):
        model(torch.randn(5, 32))


@pytest.mark.parametrize("recipe", ["folded", "rowwise", "rotated"])
def test_weights_that_are_there_while_their_layer_computes(recipe):
    """All at one address: what a layer finds there belongs to it alone."""
    model, twin = net(recipe), net(recipe)
    for layer in twin.children():
        layer.shared = None  # computed one by one, as weights come
    model = gathered_for_each_call(model)
    x = torch.randn(5, 32)
    for _ in range(2):
        y = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [net(own) for net, own in zip((model, twin), y, strict=True)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().sum().backward()
        assert torch.equal(y[0].grad, y[1].grad)
        with torch.no_grad():
            for layer, other in zip(model.children(), twin.children(), strict=True):
                for name, p in other.named_parameters():
                    layer.whole[name] -= 0.1 * p.grad  # the owner of a shard steps it
                    p.data.copy_(layer.whole[name])
                    p.grad = None


@pytest.mark.parametrize("write", [lambda p: p.data.mul_(3.0), lambda p: p.detach().numpy().__imul__(3)])
@pytest.mark.parametrize("recipe", ["folded", "rowwise"])
@pytest.mark.parametrize("kind", ["grouped", "convolution", "mlp", "head"])
def test_a_write_is_seen_by_layers_of_every_kind(kind, recipe, write, make_mlp):
    def made() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        torch.manual_seed(3)
        if kind == "grouped":
            experts = GroupedLinear(2, 32, 48, recipe=recipe)
            return experts, lambda x: experts(x, torch.tensor([2, 5], dtype=torch.int32))
        if kind == "convolution":
            layer = Conv2d(2, 8, 3, recipe=recipe)
            return layer, lambda x: layer(x.reshape(5, 2, 4, 4))
        if kind == "head":
            head = nn.Linear(32, 64, bias=False)
            targets = torch.arange(5)
            return head, lambda x: linear_cross_entropy(x, head.weight, targets, recipe=recipe)
        model = make_mlp()
        octavo.convert(model, recipe, policy=Policy(min_gain=0.0, min_features=16))
        return model, model

    model, call = made()
    before = results(model, call)
    for p in model.parameters():
        write(p)
    after = results(model, call)
    fresh, call = made()
    for p, value in zip(fresh.parameters(), model.parameters(), strict=True):
        p.data.copy_(value.data)
    assert all(torch.equal(a, b) for a, b in zip(after, results(fresh, call), strict=True))
    assert not torch.equal(before[0], after[0])


def test_backward_reads_the_codes_of_its_own_forward():
    model, twin = net("folded"), net("folded")
    x = torch.randn(5, 32).requires_grad_()
    loss = model(x).square().sum()
    for p in model.parameters():
        p.data.mul_(3.0)  # between forward and backward
    loss.backward()
    y = x.detach().requires_grad_()
    twin(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("run", [lambda layer: layer, lambda layer: torch.compile(layer, backend="aot_eager")])
@pytest.mark.parametrize("recipe", ["folded", "folded_fast"])
def test_codes_of_a_bf16_weight_are_made_again_in_backward_from_its_scale(recipe, run):
    torch.manual_seed(0)
    layer = Linear(128, 256, bias=False, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = run(layer)(x)
    codes = [tuple(tensor.shape) for tensor in kept if tensor.element_size() == 1]
    assert codes == [(64, 128)], "of the input alone"
    dx, dw = torch.autograd.grad(y.square().sum(), [x, layer.weight])
    with reuse_weight_codes(layer):  # codes are there, and are transposed
        expected = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight])
    assert torch.equal(dx, expected[0]) and torch.equal(dw, expected[1])
    torch._dynamo.reset()


def test_a_bf16_weight_written_before_backward_is_refused_as_by_pytorch():
    layer = Linear(128, 256, bias=False, dtype=torch.bfloat16, recipe="folded")
    y = layer(torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True))
    with torch.no_grad():
        layer.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_checkpoint_computes_with_the_weights_of_its_own_forward():
    model, twin = net("folded"), net("folded")
    found = results(model, lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(found, results(twin, twin), strict=True))


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_weights_in_one_launch_are_those_of_the_specification(dtype):
    stack = [nn.Parameter(parameter(n, 1000, dtype).cuda()) for n in (512, 128, 129)]
    for _ in range(3):
        codes = quantize_weights(stack, ROW)
        assert same(codes.stack, specified(torch.cat([w.detach() for w in stack]), ROW))
        for w in stack:
            w.data.mul_(0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2])
def test_a_captured_graph_quantises_the_weights_of_each_replay(count):
    stack = [nn.Parameter(parameter(256, 512).cuda()) for _ in range(count)]
    quantize_weights(stack, ROW)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codes = quantize_weights(stack, ROW)
    for _ in range(2):
        for w in stack:
            w.data.copy_(torch.randn_like(w))
        graph.replay()
        assert same(codes.stack, specified(torch.cat(stack), ROW))
