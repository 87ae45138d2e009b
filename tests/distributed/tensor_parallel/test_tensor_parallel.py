"""Tensor and sequence parallel against one process: codes, losses, gradients, and bytes on the wire."""

from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
from alone import join_alone
from sharded import FP32, SHAPE, batch, full_state, loss_of
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import octavo
from octavo import kernels
from octavo.distributed import ColumnParallel, Parallel, RowParallel, shard, tensor_parallel
from octavo.distributed.tensor_parallel import tokens as tokens_of
from octavo.distributed.tensor_parallel.layers import _check_recipe, _rounds_gradient
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels import QuantSpec, quantize_matrix
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.llama import Llama
from octavo.nn import Linear
from octavo.nn.attached_codes import attached_codes
from octavo.nn.functional import linear
from octavo.numerics import INT8, PER_ROW, dequantize, quantize, sqnr_db
from octavo.recipes import load
from octavo.tensor import FP8Tensor
from octavo_bench.traffic import Traffic

ROW = QuantSpec("e4m3", "row", "power_of_two")
HOW = ["folded", "whole tokens", "bf16", "tensorwise", "apart", "tied", "norms of heads", "norms, whole tokens"]
HOW += ["biases", "biases, whole tokens", "rotated", "rotated by smaller blocks"]


def llama(recipe="folded", policy=None, **shape):
    torch.manual_seed(0)
    model = Llama(ModelConfig(**{**SHAPE, "kv_heads": 2, **shape}))
    octavo.convert(model, recipe, policy=policy)
    return model


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model):
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def errors(found, exact):
    """Return the relative error of all gradients together, and the largest of one parameter."""
    own = {name: ((found[name] - g).norm() / g.norm()).item() for name, g in exact.items()}
    both = [torch.cat([g.flatten() for g in gs.values()]) for gs in (found, exact)]
    return {"all": ((both[0] - both[1]).norm() / both[1].norm()).item(), "worst": max(own.values())}


def compare(mesh, recipe="folded", sequence=True, policy=None, **shape):
    """Return losses and errors of gradients, against FP32, of a model that is cut and of one process."""
    model, alone, exact = (llama(r, policy, **shape) for r in (recipe, recipe, "bf16"))
    plan = tensor_parallel(model, mesh, sequence=sequence)
    tokens, targets = batch(0, 2)
    with Traffic() as traffic:
        loss = loss_of(model, tokens, targets)
        loss.backward()
    alone_loss, exact_loss = loss_of(alone, tokens, targets), exact(tokens, targets)
    alone_loss.backward()
    exact_loss.backward()
    right = gradients(exact)
    with torch.no_grad():
        logits = loss_of(model, tokens, None), loss_of(alone, tokens, None)
        with octavo.disabled(model):
            high = model(tokens), exact(tokens)
    return {
        "losses": (loss.item(), alone_loss.item(), exact_loss.item()),
        "errors": (errors(gradients(model), right), errors(gradients(alone), right)),
        "traffic": traffic.bytes,
        "calls": traffic.calls,
        "sent": {row.name: row.sent for row in plan.layers},
        "reasons": {row.reason for row in plan.layers},
        "logits": ((logits[0] - logits[1]).norm() / logits[1].norm()).item(),
        "high": (high[0] - high[1]).abs().max().item(),
        "names": list(model.state_dict()) == list(alone.state_dict()),
        "equal": all(torch.equal(v, alone.state_dict()[k]) for k, v in full_state(model).items()),
    }


def two_ranks(rank, count):
    mesh = init_device_mesh("cpu", (count,))
    found = {
        "folded": compare(mesh),
        "whole tokens": compare(mesh, sequence=False),
        "bf16": compare(mesh, "bf16"),
        "tensorwise": compare(mesh, "tensorwise"),
        "apart": compare(mesh, policy=octavo.Policy(fuse=False), layers=1),
        "tied": compare(mesh, policy=octavo.Policy(keep_defaults=False), tie_embeddings=True, layers=1),
        "norms of heads": compare(mesh, qk_norm=True, layers=1),
        "norms, whole tokens": compare(mesh, sequence=False, qk_norm=True, layers=1),
        "biases": compare(mesh, qkv_bias=True, layers=1),
        "biases, whole tokens": compare(mesh, sequence=False, qkv_bias=True, qk_norm=True, layers=1),
        "rotated": compare(mesh, "rotated", dim=128, ffn=512, layers=1),
        "rotated by smaller blocks": compare(mesh, "rotated", sequence=False, dim=128, ffn=320, layers=1),
    }
    return {**found, "masked": masked(mesh), "shared": shared(mesh), "gathered": gathered(rank, mesh),
            "lone": lone(rank, mesh), "part": rotated_part(rank, mesh), "once": quantised_once(rank, mesh),
            "trained": trained(mesh), "frozen": frozen(mesh), "compiled": compiled(count),
            "refused": refusals(mesh), "left whole": left_whole(mesh)}  # fmt: skip


def masked(mesh):
    """Return losses and gradients of a cut model and of one process, of whose tokens few or none count on one rank."""
    tokens, targets = batch(0, 2)
    targets = targets.clone()
    targets[:, :8], targets[1, 8:10] = -100, -100
    uneven = targets.clone()
    uneven[:, :8], uneven[1, 2:8] = tokens[:, :8], -100
    models = llama(), llama()
    tensor_parallel(models[0], mesh)
    with torch.no_grad():
        losses = [
            [loss_of(partial(model, **how), tokens, those).tolist() for model in models]
            for those in (targets, uneven)
            for how in ({}, {"by_sequence": True}, {"by_sequence": True, "hits": True})
        ]
    for model in models:
        loss_of(model, tokens, targets).backward()
    return {"losses": losses, "error": errors(*map(gradients, models))["all"]}


def shared(mesh):
    """Return how many parameters there are before and after, where layers of two blocks and two norms share one."""
    model = llama()
    first, second = model.layers
    second.feed_forward.w1.weight, second.ffn_norm.weight = first.feed_forward.w1.weight, first.ffn_norm.weight
    before = len(list(model.parameters()))
    tensor_parallel(model, mesh)
    loss_of(model, *batch(0, 2)).backward()
    up, down = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
    up.weight = down.weight
    both = nn.ModuleDict({"up": up, "down": down})
    said = ranks.refusal(UnsupportedError, lambda: parallelize_module(both, mesh, Parallel(["up"], ["down"])))
    return before, len(list(model.parameters())), said


def gathered(rank, mesh):
    """Return whether codes that are gathered are those of all tokens, and what layers read of a column-parallel one."""
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))
    own = x[:, 4 * rank : 4 * rank + 4].contiguous()
    y = tokens_of.all_gather_codes(own, ROW, mesh.get_group())
    found, expected = attached_codes(y, ROW), quantize_matrix(x.reshape(16, 32), ROW)
    same = torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    return same and torch.equal(found.scale, expected.scale) and bool(y.isnan().all())


def lone(rank, mesh):
    """Return whether a column-parallel layer's outputs are those of one process to the bit; the error of two layers."""
    torch.manual_seed(3)
    up, down = Linear(32, 64, bias=True), Linear(64, 32, bias=True)
    x = torch.randn(2, 8, 32)
    own = x[:, 4 * rank : 4 * rank + 4].clone().requires_grad_()
    first = up(x)
    expected = down(first)
    expected.square().sum().backward()
    bias = down.bias.grad.clone()
    for layer in (up, down):
        layer.zero_grad()
    model = nn.Sequential(up, down)
    parallelize_module(model, mesh, {"0": ColumnParallel(), "1": RowParallel()})
    columns = model[0](own)
    result = model(own)
    result.square().sum().backward()
    error = (result - expected[:, 4 * rank : 4 * rank + 4]).norm() / expected.norm()
    return {
        "columns": torch.equal(columns, first.chunk(2, -1)[rank]),
        "error": error.item(),
        "bias": ((whole(down.bias.grad) - bias).norm() / bias.norm()).item(),
        "restored": isinstance(up.weight, DTensor),
    }


def rotated_part(rank, mesh):
    """Return whether a row-parallel layer of 320 inputs is, to the bit, the sum of two products rotated by 16."""
    torch.manual_seed(4)
    layer, x = Linear(320, 64, bias=False, recipe="rotated"), torch.randn(8, 320).bfloat16()
    layer.weight.data.mul_(torch.randn(1, 320).mul(2).exp())
    parts = []
    for operands in zip(x.chunk(2, 1), layer.weight.data.chunk(2, 1), strict=True):
        a, b = (quantize(part.contiguous(), INT8, PER_ROW, "float32", rotation=16) for part in operands)
        sums = (a.codes.long() @ b.codes.long().t()).float()
        parts.append((sums * a.scale * b.scale.t()).bfloat16())
    parallelize_module(layer, mesh, RowParallel(sequence=False))
    with torch.autocast("cpu", torch.bfloat16):
        return torch.equal(layer(x.chunk(2, 1)[rank].contiguous()), parts[0] + parts[1])


def frozen(mesh):
    """Return which parameters of a cut model have a gradient; a projection and a norm of each block are frozen."""
    model = llama()
    tensor_parallel(model, mesh)
    for block in model.layers:
        for parameter in (block.attention.wq.weight, block.ffn_norm.weight):
            parameter.requires_grad_(False)
    loss_of(model, *batch(0, 2)).backward()
    return {name: (p.grad is not None, p.requires_grad) for name, p in model.named_parameters()}


def quantised_once(rank, mesh):
    """Return how many weights are quantised in each step, of two passes: of each the shard itself, and no copy."""
    model = llama()
    tensor_parallel(model, mesh)
    kept = {p._local_tensor.data_ptr() for n, p in model.named_parameters() if n.startswith("layers") and p.dim() > 1}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    calls, quantize = [0], kernels.quantize_stack

    def counting(weights, target):
        calls[-1] += sum(weight.data_ptr() in kept for weight in weights)
        return quantize(weights, target)

    kernels.quantize_stack = counting
    for _ in range(2):
        for _ in range(2):
            loss_of(model, *batch(0, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
        calls.append(0)
    kernels.quantize_stack = quantize
    return calls


def trained(mesh):
    """Return the losses and norms of steps of `octavo.optim`, cut and in one process."""
    models = llama(), llama()
    tensor_parallel(models[0], mesh)
    return steps(models, lambda model, step: loss_of(model, *batch(step, 2)))


def compiled(count):
    """Return losses and gradients of a model whose blocks are compiled, less eager ones, and how many were compiled.

    It is sharded, too, over one rank: what FSDP2 gathers again, backward of compiled code has kept.
    """
    mesh = init_device_mesh("cpu", (1, count), mesh_dim_names=("data", "tensor"))
    counter = CompileCounterWithBackend("aot_eager")
    found = []
    for backend in (None, counter):
        model = llama(layers=3)
        tensor_parallel(model, mesh["tensor"])
        shard(model, mesh["data"])
        for block in model.layers if backend else ():
            block.forward = torch.compile(block.forward, backend=backend, fullgraph=True, dynamic=False)
        losses = []
        for step in range(2):
            tokens, targets = batch(step, 1)
            loss = model(tokens, targets)
            loss.backward()
            losses.append(loss.item())
        found.append((losses, gradients(model)))
    torch._dynamo.reset()
    (eager, right), (losses, own) = found
    apart = max(abs(a - b) for a, b in zip(losses, eager, strict=True))
    return {"apart": apart, "error": errors(own, right)["all"], "blocks": counter.frame_count}


def steps(models, loss_in, second=None):
    optimizers = [octavo.optim.AdamW(m.named_parameters(), lr=3e-3, states="fp8", clip=1.0) for m in models]
    rows = []
    for step in range(3):
        row = []
        for model, optimizer, forward in zip(models, optimizers, (loss_in, second or loss_in), strict=True):
            loss = forward(model, step)
            loss.backward()
            optimizer.step()
            row += [loss.item(), optimizer.grad_norm.item()]
            optimizer.zero_grad()
        rows.append(row)
    return rows


def left_whole(mesh):
    """Return what is said of models whose later layers cannot be cut, and whether a parameter was replaced."""
    odd, tied, both = llama(ffn=161), llama(), nn.ModuleDict({"up": nn.Linear(8, 8), "down": nn.Linear(7, 8)})
    tied.layers[1].attention.wq.weight = tied.layers[0].attention.wo.weight
    twice = llama()
    tensor_parallel(twice, mesh)
    attempts = [
        (odd, lambda: tensor_parallel(odd, mesh)),
        (twice, lambda: tensor_parallel(twice, mesh)),
        (tied, lambda: tensor_parallel(tied, mesh)),
        (both, lambda: parallelize_module(both, mesh, Parallel(["up"], ["down"]))),
    ]
    found = []
    for model, attempt in attempts:
        before = [id(parameter) for parameter in model.parameters()]
        said = ranks.refusal(UnsupportedError, attempt)
        found.append((said, before == [id(parameter) for parameter in model.parameters()]))
    return found


def refusals(mesh):
    attempts = [
        lambda: tensor_parallel(nn.Linear(2, 2), mesh),
        lambda: tensor_parallel(llama(kv_heads=1), mesh),
        lambda: tensor_parallel(llama("delayed"), mesh),
        lambda: parallelize_module(Linear(8, 7), mesh, ColumnParallel()),
        lambda: parallelize_module(nn.ModuleDict({"up": nn.ReLU()}), mesh, Parallel(["up"])),
    ]
    said = [ranks.refusal((ConfigError, UnsupportedError), attempt) for attempt in attempts]
    model = llama()
    tensor_parallel(model, mesh)
    return [*said, ranks.refusal(UnsupportedError, lambda: model(torch.zeros(1, 15, dtype=torch.long)))]


def four_ranks(rank, count):
    """Return the results of a run of TP 2 x DP 2 with weights gathered in FP8."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    models = llama(), llama()
    tensor_parallel(models[0], mesh["tensor"])
    plan = shard(models[0], mesh["data"], mp_policy=FP32)
    part = mesh["data"].get_local_rank()
    kinds = set()

    def own(model, step):
        kinds.add(type(model.layers[0].attention.wq.weight._local_tensor).__name__)
        tokens, targets = batch(step, 2)
        return loss_of(model, tokens[part : part + 1], targets[part : part + 1])

    def alone(model, step):
        tokens, targets = batch(step, 2)
        return sum(loss_of(model, tokens[i : i + 1], targets[i : i + 1]) for i in range(2)) / 2

    rows = steps(models, own, alone)
    models[0].zero_grad()
    own(models[0], 9).backward()
    moments = first_moments(models[0])
    models[0].layers[0].unshard()
    gathered = isinstance(models[0].layers[0].attention.wq.weight._local_tensor, FP8Tensor)
    models[0].layers[0].reshard()
    state, expected = full_state(models[0]), models[1].state_dict()
    drift = max(((state[k] - v).norm() / v.norm()).item() for k, v in expected.items())
    sent = {p.name: p.sent for p in plan.parameters}
    return {"rows": rows, "sent": sent, "gathered": gathered, "drift": drift, "moments": moments}


def first_moments(model):
    """Return the largest error of one-byte first moments in the state dict after a step."""
    expected = {name: 0.1 * gradient for name, gradient in gradients(model).items()}
    optimizer = octavo.optim.AdamW(model.named_parameters(), states="fp8", keep=lambda name, p: None, betas=(0.9, 0.99))
    optimizer.step()
    apart = {}
    states = optimizer.state_dict()["state"].values()
    for (name, parameter), state in zip(model.named_parameters(), states, strict=True):
        if parameter.dim() == 2:
            codes, scale = (whole(state[key]) for key in ("exp_avg_codes", "exp_avg_scale"))
            each = parameter.shape[1] // scale.shape[1]  # a rank's part of a row is less than a group
            by = (scale.float() - 127).exp2().repeat_interleave(each, dim=1)
            value = codes.view(torch.float8_e4m3fn).float() * by
            apart[name] = ((value - expected[name]).norm() / expected[name].norm()).item()
    return max(apart.values())


@pytest.fixture(scope="module")
def on_two():
    return ranks.run(two_ranks, 2)


@pytest.fixture(scope="module")
def on_four():
    return ranks.run(four_ranks, 4)


@pytest.mark.parametrize("how", HOW)
def test_a_cut_model_is_as_near_to_the_truth_as_one_process(on_two, how):
    for result in on_two:
        found = result[how]
        loss, alone, exact = found["losses"]
        assert abs(loss - alone) < 2e-3 * exact
        cut, one = found["errors"]
        assert cut["all"] < 1.1 * one["all"] + 1e-3
        assert cut["worst"] < 1.3 * one["worst"] + 1e-2
        assert found["logits"] < 0.05 and found["high"] < 1e-4
        assert found["names"] and found["equal"]
    assert on_two[0][how]["losses"] == on_two[1][how]["losses"]


def test_a_rank_without_a_token_that_counts_adds_nothing_to_the_loss(on_two):
    for result in on_two:
        for cut, alone in result["masked"]["losses"]:
            assert torch.tensor(cut).allclose(torch.tensor(alone), rtol=5e-3)
        assert result["masked"]["error"] < 0.2


def test_shared_parameters_stay_shared_or_are_refused(on_two):
    before, after, said = on_two[0]["shared"]
    assert before == after
    assert "shares it" in said


def test_tokens_are_gathered_as_codes_with_a_byte_an_element(on_two):
    tokens, width = 2 * SHAPE["sequence"], SHAPE["dim"]
    gathers = 2 * SHAPE["layers"]  # before attention and before the feed-forward
    once = {"folded": gathers * tokens * (width + 4), "bf16": gathers * tokens * 2 * width}
    for how, sent in once.items():  # forward, and the gradients of what was scattered in backward
        assert on_two[0][how]["traffic"]["all_gather"] == 2 * sent
        assert on_two[0][how]["traffic"]["reduce_scatter"] == 2 * once["bf16"]


@pytest.mark.parametrize("recipe", ["folded", "rowwise", "block"])
def test_a_gradient_that_arrives_as_codes_is_as_good_as_one_in_bf16(recipe):
    """Rounding to E4M3 with a power of two per token commutes with the folds, but for what they make subnormal."""
    spread = (torch.randn(512, 1).exp(), (1.5 * torch.randn(512, 1)).exp() * torch.randn(1, 256).exp())
    x, dy = (scale * torch.randn(512, 256) for scale in spread)
    x, dy, w = x.bfloat16(), dy.bfloat16(), torch.randn(256, 256).bfloat16()
    rounded = dequantize(kernels.quantize(dy, "e4m3", "row"), torch.bfloat16)
    found = []
    for gradient in (dy, rounded):
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        linear(*leaves, None, load(recipe)).backward(gradient)
        found.append([leaf.grad for leaf in leaves])
    for own, sent, least in zip(*found, (80, 60), strict=True):
        assert sqnr_db(own, sent) > least
    layer = nn.Linear(32, 32)
    octavo.convert(layer, recipe)
    assert _rounds_gradient(layer)
    for other in (
        "tensorwise",
        {"fprop": {"weight": {"scaling": "float32"}}, "dgrad": {"weight": {"scaling": "float32"}}},
    ):
        octavo.convert(layer, other)  # E5M2 gradients; scales of another kind, folded into the gradient
        assert not _rounds_gradient(layer)
    assert not _rounds_gradient(layer) and not _rounds_gradient(nn.Linear(32, 32))


def test_a_block_takes_few_collectives(on_two):
    """Codes and scales are one gather, and the gradients of both norms of a block one sum."""
    layers, how = SHAPE["layers"], on_two[0]["folded"]["calls"]
    assert how["all_gather"] == how["reduce_scatter"] == 4 * layers  # two forward, two backward
    ends = 2 + 3  # the two sums of the loss, the gradients of embedding, last norm and head
    assert how["all_reduce"] == layers + ends


def test_what_is_frozen_has_no_gradient(on_two):
    assert all(has == needs for has, needs in on_two[0]["frozen"].values())
    assert {needs for _, needs in on_two[0]["frozen"].values()} == {True, False}


def test_the_plan_says_what_is_sent_and_why(on_two):
    assert on_two[0]["folded"]["sent"]["layers.0.attention.wq"] == "e4m3 row"
    assert on_two[0]["folded"]["sent"]["layers.0.attention.wo"] == "bfloat16"
    assert on_two[0]["folded"]["reasons"] == {""}
    assert on_two[0]["tensorwise"]["reasons"] == {"", "a per-tensor scale needs the amax of all ranks' tokens"}


def test_gathered_codes_are_those_of_one_process_to_the_bit(on_two):
    assert all(result["gathered"] for result in on_two)


def test_a_column_parallel_layer_is_equal_to_the_bit_and_a_row_parallel_one_nearly(on_two):
    for result in on_two:
        assert result["lone"]["columns"] and result["lone"]["restored"]
        assert result["lone"]["error"] < 0.02 and result["lone"]["bias"] < 0.02


def test_a_weight_is_quantised_once_per_forward(on_two):
    assert on_two[0]["once"] == [2 * 14, 2 * 14, 0]


def test_an_optimizer_steps_cut_weights_as_whole_ones(on_two):
    for loss, norm, alone, alone_norm in on_two[0]["trained"]:
        assert loss == pytest.approx(alone, rel=2e-3)
        assert norm == pytest.approx(alone_norm, rel=0.02)


def test_compiled_blocks_compute_the_same_and_are_compiled_once(on_two):
    for result in on_two:
        found = result["compiled"]
        assert found["blocks"] == 1
        assert found["apart"] < 5e-3 and found["error"] < 0.05


@pytest.mark.slow
def test_a_gather_of_codes_can_be_lowered():
    """Not only traced, as above: PyTorch 2.11 refused it, as strides of scales that the compiler makes are its own."""
    join_alone(2)
    try:
        x = torch.randn(1, 8, 32).bfloat16()
        gather = lambda x: tokens_of._all_gather_rounded(2 * x, dist.group.WORLD)  # noqa: E731
        assert torch.equal(torch.compile(gather, fullgraph=True)(x), gather(x))
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()


def test_what_cannot_be_cut_is_refused(on_two):
    words = ["has no layers", "2 ranks cannot share", "has stored per-tensor scales", "7 outputs", "only linear", "2"]
    for said, word in zip(on_two[0]["refused"], words, strict=True):
        assert word in said


def test_a_model_that_is_refused_stays_as_it_was(on_two):
    words = [
        "layers.0.feed_forward.w1.weight (161, 64): 161 outputs",
        "an earlier call",
        "a layer that shares it",
        "7 inputs",
    ]
    for result in on_two:
        for word, (said, unchanged) in zip(words, result["left whole"], strict=True):
            assert word in said and unchanged


def test_tensor_parallel_with_data_parallel(on_four):
    first, second = on_four[0], on_four[2]  # of the same rank of tensor parallel
    for own, other in zip(first["rows"], second["rows"], strict=True):
        assert (own[0] + other[0]) / 2 == pytest.approx(own[2], rel=2e-3)
        assert own[1] == other[1] == pytest.approx(own[3], rel=0.02)
    assert all(result["gathered"] and result["drift"] < 0.05 for result in on_four)
    assert first["sent"]["layers.0.attention.wo.weight"] == "e4m3 row"


def test_states_of_one_byte_are_told_as_those_of_whole_weights_in_two_cuts(on_four):
    assert all(0.005 < result["moments"] < 0.05 for result in on_four)  # E4M3, rounded stochastically, is 3 % off


def test_a_part_of_a_row_is_rotated_by_the_largest_blocks_that_divide_it(on_two):
    assert all(result["part"] for result in on_two)
    said = on_two[0]["rotated by smaller blocks"]["reasons"]
    assert said == {"", "rotated by blocks of 16, the largest power of 4 that divides a rank's 160 inputs"}
    assert not any("rotated by" in reason for reason in on_two[0]["rotated"]["reasons"])


def test_parts_that_no_rotation_divides_are_refused():
    layer = octavo.nn.Linear(320, 64, recipe="rotated")
    message = r"layers\.0\.wo: .*no block of 16 or more divides the 40 inputs of a rank\. Take fewer ranks, or 'folded'"
    with pytest.raises(UnsupportedError, match=message):
        _check_recipe(layer, "layers.0.wo", 8)
    for parts in (1, 2, 4, 5):
        _check_recipe(layer, "layers.0.wo", parts)
    _check_recipe(octavo.nn.Linear(320, 64, recipe="folded"), "layers.0.wo", 8)


def test_columns_of_rotated_layers_are_gathered_as_values(on_two):
    found = on_two[0]["rotated"]
    assert set(found["sent"].values()) == {"bfloat16"}
    assert any("fprop and wgrad read different codes" in reason for reason in found["reasons"])
