"""Pipeline parallel by PyTorch's schedules against one process: losses, gradients, products computed, bytes sent."""

import pytest
import ranks
import torch
from sharded import FP32, SHAPE, batch
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

import octavo
from octavo import kernels
from octavo.distributed import PipelineStage, given_loss, shard
from octavo.distributed.pipeline import pack, unpack
from octavo.errors import ConfigError, UnsupportedError
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.llama import Llama
from octavo.lab.models.stages import stages

MICROBATCHES = 4
ONE_PASS = ["Schedule1F1B", "ScheduleInterleaved1F1B"]
BY_PARTS = ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"]
"""Schedules that go backward for inputs and weights apart."""
GOES_BY_PARTS = TorchVersion(torch.__version__) >= "2.13"
by_parts = pytest.mark.skipif(not GOES_BY_PARTS, reason="needs PyTorch 2.13")


def llama(recipe="folded", **shape):
    torch.manual_seed(0)
    model = Llama(ModelConfig(**{**SHAPE, "layers": 4, **shape}))
    octavo.convert(model, recipe)
    return model


def run_schedule(name, parts, index, count, group, tokens, targets, sent):
    """Run a schedule on the stages of one rank, and return the mean loss where the last one is, and the stages."""
    ranks_in_it = group.size()
    own = [index] if len(parts) == ranks_in_it else placed(name, index, ranks_in_it, len(parts))
    made = [PipelineStage(parts[i], i, len(parts), torch.device("cpu"), group=group, sent=sent) for i in own]
    kind = getattr(pipelining, name)
    schedule = kind(made[0] if len(own) == 1 else made, MICROBATCHES, loss_fn=given_loss, scale_grads=True)
    last, losses = made[-1].is_last or made[0].is_last, []
    arguments = (tokens,) if 0 in own else ()
    if last:
        schedule.step(*arguments, targets_BT=targets, target=targets, losses=losses)
    else:
        schedule.step(*arguments)
    return torch.stack(losses).mean().item() if last else None, made


def placed(name, rank, count, all_stages):
    """Return the stages of a rank: in a V with `ScheduleZBVZeroBubble`, else in turn."""
    if name == "ScheduleZBVZeroBubble":
        return [rank, all_stages - 1 - rank]
    return list(range(rank, all_stages, count))


def train(name, rank, count, stage_count, sent="as is", recipe="folded"):
    """Return the losses of a pipeline and of one process, the error of gradients, and the FP8 products of both."""
    model, alone = llama(recipe), llama(recipe)
    group = torch.distributed.group.WORLD
    tokens, targets = batch(0, MICROBATCHES)
    before = len(PRODUCTS)
    loss, made = run_schedule(name, stages(model, stage_count), rank, count, group, tokens, targets, sent)
    used = len(PRODUCTS) - before
    alone_loss = 0.0
    for row in range(MICROBATCHES):
        part = alone(tokens[row : row + 1], targets[row : row + 1]) / MICROBATCHES
        part.backward()
        alone_loss += part.item()
    right = dict(alone.named_parameters())
    found = {n: p.grad for stage in made for n, p in stage.submod.named_parameters()}
    difference = torch.cat([(g - right[n].grad).flatten() for n, g in found.items()]).norm()
    total = torch.cat([right[n].grad.flatten() for n in found]).norm()
    return {
        "loss": loss,
        "alone": alone_loss,
        "error": (difference / total).item(),
        "products": used,
        "sent": sum(stage.sent_bytes for stage in made),
    }


PRODUCTS: list[int] = []


def count_products():
    gemm = kernels.gemm

    def counting(*arguments):
        PRODUCTS.append(1)
        return gemm(*arguments)

    kernels.gemm = counting


def two_ranks(rank, count):
    count_products()
    names = ONE_PASS + (BY_PARTS if GOES_BY_PARTS else [])
    found = {name: train(name, rank, count, 2 if name == "Schedule1F1B" else 4) for name in names}
    found |= {
        "rotated": train("Schedule1F1B", rank, count, 2, recipe="rotated"),
        "bf16": train("Schedule1F1B", rank, count, 2, "bf16"),
        "fp8 1F1B": train("Schedule1F1B", rank, count, 2, "fp8"),
    }
    return found | ({"fp8": train("ScheduleZBVZeroBubble", rank, count, 4, "fp8")} if GOES_BY_PARTS else {})


def four_ranks(rank, count):
    """Return the losses of steps of PP 2 x DP 2, and those of one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    model, alone = llama(), llama()
    part, place = mesh["data"].get_local_rank(), mesh["pipeline"].get_local_rank()
    parts = stages(model, 2)
    shard(parts[place], mesh["data"], mp_policy=FP32, reshard_after_forward=False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (parts[place], alone)]
    rows = []
    for step in range(2):
        tokens, targets = batch(step, 2 * MICROBATCHES)
        own = slice(part * MICROBATCHES, (part + 1) * MICROBATCHES)
        group = mesh["pipeline"].get_group()
        loss, _ = run_schedule("Schedule1F1B", parts, place, 2, group, tokens[own], targets[own], "bf16")
        expected = []
        for row in range(2 * MICROBATCHES):
            one = alone(tokens[row : row + 1], targets[row : row + 1])
            (one / (2 * MICROBATCHES)).backward()
            expected.append(one.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        rows.append((loss, sum(expected[own]) / MICROBATCHES))
    right = dict(alone.named_parameters())
    drift = [
        ((p.full_tensor() if isinstance(p, DTensor) else p) - right[n]).norm() / right[n].norm()
        for n, p in parts[place].named_parameters()
    ]
    return {"rows": rows, "drift": max(drift).item()}


@pytest.fixture(scope="module")
def on_two():
    return ranks.run(two_ranks, 2)


@pytest.mark.parametrize("schedule", ["rotated", *ONE_PASS, *(pytest.param(name, marks=by_parts) for name in BY_PARTS)])
def test_a_schedule_computes_what_one_process_does_to_the_bit(on_two, schedule):
    found = [result[schedule] for result in on_two]
    assert [x["loss"] for x in found if x["loss"] is not None] == [pytest.approx(found[0]["alone"], rel=1e-6)]
    assert all(x["error"] < 1e-6 for x in found)


@by_parts
@pytest.mark.parametrize("schedule", BY_PARTS)
def test_backward_in_two_passes_repeats_one_product_of_an_mlp_and_no_other(on_two, schedule):
    products = [sum(r[name]["products"] for r in on_two) for name in (schedule, "ScheduleInterleaved1F1B")]
    in_two_passes = 3 * MICROBATCHES  # the first stage has no gradient of its input, and one block is in each
    assert products[0] == products[1] + in_two_passes


@pytest.mark.parametrize(
    ("sent", "error"), [("bf16", 0.05), pytest.param("fp8", 0.3, marks=by_parts), ("fp8 1F1B", 0.15)]
)
def test_what_is_sent_in_fewer_bits_changes_little(on_two, sent, error):
    found = [result[sent] for result in on_two]
    loss = next(x["loss"] for x in found if x["loss"] is not None)
    assert loss == pytest.approx(found[0]["alone"], rel=2e-3)
    assert 0 < max(x["error"] for x in found) < error


def test_fp8_sends_a_byte_an_element_and_a_scale_a_token(on_two):
    tokens, width = MICROBATCHES * SHAPE["sequence"], SHAPE["dim"]
    assert [result["Schedule1F1B"]["sent"] for result in on_two] == [4 * tokens * width] * 2
    assert [result["bf16"]["sent"] for result in on_two] == [2 * tokens * width] * 2
    assert [result["fp8 1F1B"]["sent"] for result in on_two] == [tokens * (width + 4), 2 * tokens * width]


def test_pipeline_with_data_parallel():
    for result in ranks.run(four_ranks, 4):
        for loss, expected in result["rows"]:
            assert loss is None or loss == pytest.approx(expected, rel=2e-3)
        assert result["drift"] < 0.02


LOST = {"as is": 0, "bf16": 2**-8, "fp8": 2**-4}


@pytest.mark.parametrize("sent", LOST)
def test_what_is_packed_is_unpacked(sent):
    x = torch.randn(2, 5, 32)
    assert torch.allclose(unpack(pack(x, sent), x).float(), x, rtol=LOST[sent], atol=0.02)


@pytest.mark.parametrize(("blocks", "count", "sizes"), [(4, 2, [2, 2]), (5, 3, [2, 2, 1]), (5, 2, [3, 2]), (3, 1, [3])])
def test_stages_hold_the_parameters_of_the_model(blocks, count, sizes):
    model = llama(layers=blocks)
    parts = stages(model, count)
    assert [len(part.layers) for part in parts] == sizes
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    tokens, targets = batch(0, 2)
    x = tokens
    for part in parts[:-1]:
        x = part(x)
    assert torch.equal(parts[-1](x), model(tokens)) and parts[-1](x, targets).item() == model(tokens, targets).item()


def test_what_makes_no_stages_is_refused():
    with pytest.raises(ConfigError, match="5 stages of 4"):
        stages(llama(), 5)
    with pytest.raises(ConfigError, match="head too"):
        stages(llama(tie_embeddings=True), 2)
    with pytest.raises(ConfigError, match="'fp4'"):
        PipelineStage(torch.nn.Linear(2, 2), 0, 1, torch.device("cpu"), sent="fp4")


@pytest.mark.parametrize(("version", "recipe"), [("2.11.0", "folded"), ("2.11.0", None), ("2.13.0", "folded")])
def test_an_old_pytorch_does_not_go_backward_in_two_passes_through_fp8_layers(monkeypatch, version, recipe):
    model = Llama(ModelConfig(**SHAPE))
    if recipe:
        octavo.convert(model, recipe)
    stage = object.__new__(PipelineStage)
    stage.submod = stages(model, 1)[0]
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(pipelining.PipelineStage, "backward_one_chunk", lambda self, *_: "gone backward")
    if version == "2.11.0" and recipe:
        with pytest.raises(UnsupportedError, match="separately only"):
            stage.backward_one_chunk(0, None, False)
    else:
        assert stage.backward_one_chunk(0, None, False) == "gone backward"
    assert stage.backward_one_chunk(0) == "gone backward"
