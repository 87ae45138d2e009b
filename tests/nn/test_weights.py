"""What is kept of a weight: made once for each value, in the same memory, for as long as the weight lives."""

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from octavo.nn.weights import dgrad, forget, fprop, quantized_weights, weight_scale, weights_changed
from torch import Tensor, nn

from octavo import kernels
from octavo.kernels import Target
from octavo.nn import Linear, weights
from octavo.numerics import Quantized, dequantize, quantize

ROW = Target("e4m3", "row", "power_of_two")
TENSOR = Target("e4m3", "tensor", "float32")
TILE = Target("e4m3", "1x128", "power_of_two")
BLOCK = Target("e4m3", "128x128", "power_of_two")
TARGETS = [ROW, TENSOR, TILE, BLOCK, Target("e5m2", "row", "float32"), Target("e4m3", "1x32", "power_of_two")]
every_target = pytest.mark.parametrize("target", TARGETS, ids=str)


def parameter(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter((torch.randn(rows, cols) * torch.logspace(-3, 1, rows)[:, None]).to(dtype))


def specified(x: Tensor, target: Target) -> Quantized:
    return quantize(x.detach(), target.fmt, target.tile, target.scaling)


def same(a: Quantized, b: Quantized) -> bool:
    codes = torch.equal(a.codes.view(torch.uint8), b.codes.contiguous().view(torch.uint8))
    return codes and torch.equal(a.scale, b.scale) and a.granularity == b.granularity


def counted(stack: list[Tensor], target: Target = ROW, transposed: bool = False) -> int:
    """How many weights this call has quantised."""
    with kernels.record() as ledger:
        quantized_weights(stack, target, transposed)
    return ledger.weights


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = len(weights._kept)
    yield
    assert len(weights._kept) <= before, "codes outlive their weights"


# --- what it holds --------------------------------------------------------------------------------------------------


@every_target
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [(40,), (40, 24), (256, 128, 130), (128, 100, 28)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_stack_quantised_by_the_specification(target, transposed, rows, dtype):
    stack = [parameter(n, 136, dtype) for n in rows]
    whole = torch.cat([w.detach() for w in stack])
    result = quantized_weights(stack, target, transposed)
    assert same(result, specified(whole.t() if transposed else whole, target))
    assert result.codes.is_contiguous() and not result.codes.requires_grad


def test_weights_of_different_dtypes_are_quantised_without_rounding_any():
    stack = [parameter(32, 64), parameter(32, 64, torch.bfloat16)]
    assert same(quantized_weights(stack, ROW), specified(torch.cat([w.detach().float() for w in stack]), ROW))


# --- how often it is made -------------------------------------------------------------------------------------------


def test_one_quantisation_for_each_value_target_and_orientation():
    w = parameter(32, 64)
    assert [counted([w]), counted([w])] == [1, 0]
    assert [counted([w], ROW, True), counted([w], ROW, True)] == [1, 0]
    assert [counted([w], BLOCK), counted([w], BLOCK)] == [1, 0]
    assert counted([w]) == 0


def test_a_stack_counts_all_its_weights():
    a, b, c = (parameter(32, 64) for _ in range(3))
    assert [counted([a, b, c]), counted([a, b, c])] == [3, 0]
    assert counted([a, c]) == 2
    assert counted([c, a]) == 2


def test_a_change_of_one_weight_is_a_change_of_every_stack_it_is_in():
    a, b, c = (parameter(32, 64) for _ in range(3))
    for stack in ([a, b], [b, c], [a, c]):
        quantized_weights(stack, ROW)
    with torch.no_grad():
        b.mul_(3.0)
    assert [counted([a, b]), counted([b, c]), counted([a, c])] == [2, 2, 0]
    assert same(quantized_weights([a, b], ROW), specified(torch.cat([a.detach(), b.detach()]), ROW))


def step(w: nn.Parameter) -> None:
    w.grad = torch.randn_like(w)
    torch.optim.SGD([w], lr=0.1).step()


def fused_step(w: nn.Parameter) -> None:
    w.grad = torch.randn_like(w)
    version = w._version
    torch.optim.AdamW([w], lr=0.1, fused=True).step()
    with torch.no_grad():
        assert w._version >= version  # whether it moves differs between versions of PyTorch


def in_place(w: nn.Parameter) -> None:
    with torch.no_grad():
        w[3, 5] = 100.0


def copied(w: nn.Parameter) -> None:
    with torch.no_grad():
        w.copy_(torch.randn_like(w))


def other_data(w: nn.Parameter) -> None:
    w.data = torch.randn_like(w)


def reshaped(w: nn.Parameter) -> None:
    w.data = torch.randn(16, 64)


def other_dtype(w: nn.Parameter) -> None:
    w.data = w.data.to(torch.bfloat16)


def said(w: nn.Parameter) -> None:
    w.data.mul_(2.0)  # moves no counter
    weights_changed()


def forgotten(w: nn.Parameter) -> None:
    w.data.mul_(2.0)
    forget(w)


CHANGES = [step, fused_step, in_place, copied, other_data, reshaped, other_dtype, said, forgotten]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("trained", [True, False])
def test_every_change_is_seen(change, transposed, trained):
    w = parameter(32, 64).requires_grad_(trained or change in (step, fused_step))
    quantized_weights([w], ROW, transposed)
    change(w)
    assert same(quantized_weights([w], ROW, transposed), specified(w.t() if transposed else w, ROW))
    assert counted([w], ROW, transposed) == 0


def test_loading_and_moving_a_layer_are_seen():
    layer, other = Linear(64, 32), nn.Linear(64, 32)
    quantized_weights([layer.weight], ROW)
    layer.load_state_dict(other.state_dict())
    assert same(quantized_weights([layer.weight], ROW), specified(other.weight, ROW))
    layer.to(torch.bfloat16)
    assert same(quantized_weights([layer.weight], ROW), specified(other.weight.bfloat16(), ROW))
    layer.to("meta").to_empty(device="cpu")
    nn.init.ones_(layer.weight)
    assert same(quantized_weights([layer.weight], ROW), specified(torch.ones(32, 64), ROW))


def test_an_optimizer_of_others_leaves_frozen_weights_alone():
    frozen, w = parameter(32, 64).requires_grad_(False), parameter(32, 64)
    assert counted([frozen]) == 1
    step(w)
    assert counted([frozen]) == 0
    assert counted([frozen, w]) == 2
    step(w)
    assert counted([frozen, w]) == 2


# --- where it lies --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2])
def test_what_one_launch_quantises_is_written_into_the_same_memory(count):
    stack = [nn.Parameter(parameter(128, 136).cuda()) for _ in range(count)]
    first = quantized_weights(stack, ROW)
    where, old = (first.codes.data_ptr(), first.scale.data_ptr()), first.codes.clone()
    for w in stack:
        step(w)
    second = quantized_weights(stack, ROW)
    assert (second.codes.data_ptr(), second.scale.data_ptr()) == where
    assert not torch.equal(old.view(torch.uint8), second.codes.view(torch.uint8))


def test_while_a_graph_is_captured_it_is_made_each_time_and_known_never(monkeypatch):
    # The replay, not the capture, fills the memory: what was captured must not pass for the codes of today's weight.
    w = parameter(32, 64)
    quantized_weights([w], ROW)
    monkeypatch.setattr(weights, "_records", lambda weight: True)
    assert [counted([w]), counted([w])] == [1, 1]
    captured = quantized_weights([w], ROW)
    monkeypatch.undo()
    captured.codes.zero_()
    assert same(quantized_weights([w], ROW), specified(w, ROW))
    assert counted([w]) == 1, "a replay may have changed it unseen"


def test_codes_made_in_inference_mode_serve_a_training_step():
    w = parameter(32, 64)
    with torch.inference_mode():
        quantized_weights([w], ROW)
    step(w)
    kept = quantized_weights([w], ROW)
    assert not kept.codes.is_inference()


def test_a_weight_made_in_inference_mode_is_never_kept():
    with torch.inference_mode():
        w = torch.randn(32, 64)
        assert counted([w]) == 1
        w.mul_(2.0)
        assert same(quantized_weights([w], ROW), specified(w, ROW))
    assert not any(id(w) in key for key in weights._kept)


# --- how long -------------------------------------------------------------------------------------------------------


def keys_of(w: Tensor) -> list[tuple]:
    return [key for key in weights._kept if id(w) in key[2:]]


def test_nothing_is_left_of_a_weight_that_has_died():
    a, b = parameter(32, 64), parameter(32, 64)
    quantized_weights([a], ROW)
    quantized_weights([a, b], ROW)
    quantized_weights([a, b], ROW, transposed=True)
    quantized_weights([b], ROW)
    assert len(keys_of(a)) == 3
    remaining = keys_of(b)
    del a
    gc.collect()
    assert len(remaining) == 3 and len(keys_of(b)) == 1


def test_two_stacks_may_share_a_weight():
    a, b, c = (parameter(32, 64) for _ in range(3))
    assert same(quantized_weights([a, b], ROW), specified(torch.cat([a, b]), ROW))
    assert same(quantized_weights([a, c], ROW), specified(torch.cat([a, c]), ROW))
    del b
    gc.collect()
    assert counted([a, c]) == 0


def test_forgetting_drops_every_stack_and_leaves_nothing_waiting_for_the_weights_death():
    a, b = parameter(32, 64), parameter(32, 64)
    for _ in range(3):
        quantized_weights([a, b], ROW)
        finalizers = weights._kept[keys_of(a)[0]].finalizers
        forget(a)
        assert keys_of(a) == keys_of(b) == []
        assert not any(finalizer.alive for finalizer in finalizers)


def test_a_copy_is_another_weight():
    w = parameter(32, 64)
    quantized_weights([w], ROW)
    twin = copy.deepcopy(w)
    assert counted([twin]) == 1 and keys_of(twin) != keys_of(w)


# --- the operators --------------------------------------------------------------------------------------------------


def product(x: Quantized, w: Quantized) -> Tensor:
    return (dequantize(x).double() @ dequantize(w).double().t()).float()


@every_target
@pytest.mark.parametrize("rows", [(48,), (128, 256), (128, 40), (40, 128, 24)], ids=str)
def test_fprop_gives_each_weight_its_own_columns(target, rows):
    stack = [parameter(n, 136) for n in rows]
    x = kernels.quantize(torch.randn(33, 136), *(TILE if "128" in target.granularity else target)[:3])
    outputs = fprop(x, stack, target, torch.float32, "slow")
    expected = product(x, specified(torch.cat([w.detach() for w in stack]), target)).split(rows, dim=1)
    for y, z in zip(outputs, expected, strict=True):
        assert y.is_contiguous()
        torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("target", [ROW, BLOCK], ids=str)
def test_a_stack_equals_separate_weights_where_no_tile_lies_across(target):
    stack = [parameter(n, 136) for n in (128, 256, 128)]
    x = kernels.quantize(torch.randn(33, 136), *(TILE if target == BLOCK else target)[:3])
    together = fprop(x, stack, target, torch.bfloat16, "slow")
    alone = [fprop(x, [w], target, torch.bfloat16, "slow")[0] for w in stack]
    assert all(torch.equal(y, z) for y, z in zip(together, alone, strict=True))


@pytest.mark.parametrize("source", [None, ROW], ids=str)
def test_dgrad_sums_over_the_stack(source):
    target = ROW._replace(granularity="column") if source else ROW
    stack = [parameter(n, 136) for n in (48, 24)]
    g = kernels.quantize(torch.randn(33, 72), *ROW[:3])
    dx = dgrad(g, stack, target, source, torch.float32, "slow")
    whole = torch.cat([w.detach() for w in stack])
    if source:  # the codes of fprop without their scales: those are in g
        w_t = specified(whole, ROW).codes.double().t()
        expected = (dequantize(g).double() @ w_t.t()).float()
    else:
        expected = product(g, specified(whole.t(), ROW))
    torch.testing.assert_close(dx, expected, rtol=1e-5, atol=1e-3)


def test_scales_are_a_copy():
    stack = [parameter(48, 64), parameter(24, 64)]
    scale = weight_scale(stack, ROW)
    kept = quantized_weights(stack, ROW).scale
    assert torch.equal(scale, kept) and scale.data_ptr() != kept.data_ptr()


@every_target
def test_compilers_are_told_the_true_shapes(target):
    stack = [parameter(48, 136).detach(), parameter(24, 136).detach()]
    x = kernels.quantize(torch.randn(17, 136), *(TILE if "128" in target.granularity else target)[:3])
    g = kernels.quantize(torch.randn(17, 72), *(TILE if "128" in target.granularity else target)[:3])
    for operator, arguments in (
        (torch.ops.octavo.fprop, (x.codes, x.scale, x.granularity.name, stack, str(target), torch.bfloat16, "slow")),
        (
            torch.ops.octavo.dgrad,
            (g.codes, g.scale, g.granularity.name, stack, str(target), "", torch.bfloat16, "slow"),
        ),
        (torch.ops.octavo.weight_scale, (stack, str(target))),
    ):
        torch.library.opcheck(operator, arguments, test_utils="test_faketensor")


def test_compiled_code_finds_the_codes_that_are_there():
    stack = [parameter(48, 64).detach(), parameter(24, 64).detach()]

    def both(x: Tensor) -> Tensor:
        return torch.cat(fprop(kernels.quantize(x, *ROW[:3]), stack, ROW, torch.float32, "slow"), dim=1)

    compiled, x = torch.compile(both, backend="aot_eager", fullgraph=True), torch.randn(5, 64)
    with kernels.record() as ledger:
        assert torch.equal(compiled(x), both(x))
        assert ledger.weights == 2
        stack[1].mul_(2.0)
        assert torch.equal(compiled(x), both(x))
        assert ledger.weights == 4
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_weights_in_one_launch_are_what_the_specification_says(dtype):
    stack = [nn.Parameter(parameter(n, 1000, dtype).cuda()) for n in (512, 128, 129)]
    for _ in range(3):
        assert same(quantized_weights(stack, ROW), specified(torch.cat([w.detach() for w in stack]), ROW))
        for w in stack:
            step(w)


@pytest.mark.gpu
def test_a_captured_graph_quantises_the_weight_of_each_replay():
    w = nn.Parameter(parameter(256, 512).cuda())
    quantized_weights([w], ROW)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = quantized_weights([w], ROW)
    for _ in range(2):
        with torch.no_grad():
            w.copy_(torch.randn_like(w))
        graph.replay()
        assert same(kept, specified(w, ROW))
    assert same(quantized_weights([w], ROW), specified(w, ROW))


def test_a_checkpoint_finds_what_the_forward_kept():
    # Without reentrance a checkpoint hands backward detached tensors: other objects in the same memory.
    w = parameter(32, 64)
    kept = quantized_weights([w], ROW)
    assert quantized_weights([w.detach()], ROW) is kept
    step(w)
    assert same(quantized_weights([w.detach()], ROW), specified(w, ROW))
    weights.weights_changed()
    assert counted([w.detach()]) == 1
