"""Telemetry of stages on four ranks, two to a stage, against one process that has each of their batches."""

import pytest
import ranks
import torch
import torch.distributed as dist
from sharded import SHAPE, batch, llama
from torch.distributed.device_mesh import init_device_mesh
from torch.torch_version import TorchVersion

import octavo
from octavo.distributed.pipeline import SCHEDULES, Pipeline
from octavo.kernels.sample import BINS, SAMPLED, STATS, WIDTH
from octavo.lab.models.stages import Stage, stages
from octavo.nn import Linear
from octavo.nn.telemetry import Telemetry
from octavo.nn.telemetry_ranks import combined

PARTS = 4
HALF = "1f1b, the second stage in BF16"
CASES = [HALF, "interleaved"]
if TorchVersion(torch.__version__) >= "2.13":
    CASES += ["zero-bubble-v"]  # two stages per rank, and a backward in two parts


def model_of(name):
    return llama(policy=octavo.Policy(bf16_blocks=(0, 2)) if name == HALF else None, layers=4)


def text(which):
    """Return tokens and targets of one of two pipelines."""
    return [both.chunk(2)[which].contiguous() for both in batch(0, 2 * PARTS)]


def taken(telemetry):
    """Return the keys of the rows, and the values of a step, FP32 (rows, WIDTH + BINS)."""
    telemetry.step()
    telemetry.wait()
    _, values = telemetry.snapshot()
    measured = torch.full((len(values), WIDTH + BINS), torch.nan)
    measured[:, : len(STATS)] = torch.from_numpy(values)
    measured[:, SAMPLED] = torch.from_numpy(telemetry.sampled)
    measured[:, WIDTH:] = torch.from_numpy(telemetry.histograms)
    return {"rows": [[row.layer, row.role, *row.shape] for row in telemetry.rows], "measured": measured}


def staged(name, count, group):
    """Return what the ranks of two pipelines measure together."""
    schedule = SCHEDULES[name.split(",")[0]]
    mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("pipeline", "data"))
    place, which = mesh.get_coordinate()
    model = model_of(name)
    order = [layer for layer, _ in model.named_modules()]
    parts, places = stages(model, 2 * schedule.stages), schedule.places(2)
    own = {index: part for index, part in enumerate(parts) if places[index] == place}
    part = Stage(model, [block for stage in own.values() for block in stage.blocks])
    stream = {"width": SHAPE["dim"], "stream": torch.float32, "sent": "as is"}
    pipeline = Pipeline(own, schedule, mesh.get_group("pipeline"), device=torch.device("cpu"), **stream)
    with Telemetry(part, histograms_every=1, group=group, order=order) as telemetry:
        pipeline.step(*text(which), PARTS)
        return taken(telemetry)


def uneven(rank, group):
    """Return how many elements are looked at of a layer that three ranks have, and of one that all have."""
    names = ["some", "all"] if rank < 3 else ["all"]
    layers = torch.nn.ModuleDict({name: Linear(32, 32, recipe="folded") for name in names})
    with Telemetry(layers, histograms_every=1, group=group) as telemetry:
        for layer in layers.values():
            layer(torch.ones(16, 32))
        found = taken(telemetry)
    looked = {row[0]: count for row, count in zip(found["rows"], found["measured"][:, SAMPLED], strict=True)
              if row[1] == "input"}  # fmt: skip
    return {name: float(count) / (16 * 32) for name, count in looked.items()}


def alone(name):
    """Return what one process measures of the batches of both pipelines, as one."""
    found = []
    for which in range(2):
        model = model_of(name)
        with Telemetry(model, histograms_every=1) as telemetry:
            for tokens, targets in zip(*(both.chunk(PARTS) for both in text(which)), strict=True):
                (model(tokens, targets) / PARTS).backward()
            found.append(taken(telemetry))
    return {"rows": found[0]["rows"], "measured": combined(torch.stack([part["measured"] for part in found]))}


def four_ranks(rank, count):
    group = dist.new_group()
    return {"uneven": uneven(rank, group), **{name: staged(name, count, group) for name in CASES}}


@pytest.fixture(scope="module")
def results():
    return ranks.run(four_ranks, 4)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_see_the_layers_of_all_stages_as_one_process_does(results, name):
    expected = alone(name)
    assert len(expected["rows"]) == (2 if name == HALF else 4) * 7 * 4  # layers of a block, roles
    for result in results:
        found = result[name]
        assert found["rows"] == expected["rows"]
        assert torch.equal(found["measured"].nan_to_num(-1.0), expected["measured"].nan_to_num(-1.0))


def test_what_some_ranks_have_is_measured_by_those(results):
    assert all(result["uneven"] == {"some": 3, "all": 4} for result in results)
