"""Telemetry of tensor-parallel layers: a rank measures its shard as a separate layer, and ranks agree on all."""

import pytest
import ranks
import torch
import torch.distributed as dist
from sharded import SHAPE, batch
from torch.distributed.device_mesh import init_device_mesh

import octavo
from octavo.distributed import tensor_parallel
from octavo.kernels.sample import STATS
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.llama import Llama
from octavo.nn import Linear
from octavo.nn.telemetry import Telemetry
from octavo.tensor import local

LOST = [STATS.index(name) for name in ("flushed", "saturated", "sqnr")]
KEPT = [number for number in range(len(STATS)) if number not in LOST]
SCALE, NONFINITE, AMAX = (STATS.index(name) for name in ("scale", "nonfinite", "amax"))
AS_CODES = [number for number in KEPT if number not in (AMAX, SCALE)]
COLUMNS = ("wq", "wk", "wv", "w1", "w3")
FUSED, APART = octavo.Policy(), octavo.Policy(fuse=False)


def llama(policy=FUSED):
    torch.manual_seed(0)
    model = Llama(ModelConfig(**{**SHAPE, "kv_heads": 2}))
    octavo.convert(model, "folded", policy=policy)
    return model


def measured(model, group=None, broken=False):
    """Return the values of a step by layer and role."""
    tokens, targets = batch(0, 2)
    if broken:
        with torch.no_grad():
            local(model.tok_embeddings.weight)[tokens[0, 3]] = torch.nan
    with Telemetry(model, histograms_every=1, group=group) as telemetry:
        model(tokens, targets).backward()
        telemetry.step()
        telemetry.wait()
        _, values = telemetry.snapshot()
        keys = [f"{row.layer} {row.role} {list(row.shape)}" for row in telemetry.rows]
        assert (telemetry.sampled > 0).all()
    return dict(zip(keys, torch.from_numpy(values), strict=True))


def cut(mesh, policy=FUSED, sequence=True, compiled=False):
    model = llama(policy)
    tensor_parallel(model, mesh, sequence=sequence)
    for block in model.layers[:1] if compiled else ():  # beside one that is not; attention takes twice the time
        block.feed_forward.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    return model


def two_ranks(rank, count):
    mesh, group = init_device_mesh("cpu", (count,)), dist.new_group()
    found = {
        "together": measured(cut(mesh), group),
        "whole tokens": measured(cut(mesh, sequence=False), group),
        "apart": measured(cut(mesh, APART)),
        "alone": measured(cut(mesh)),
        "compiled": measured(cut(mesh, compiled=True)),
        "broken": measured(cut(mesh), group, broken=True),
    }
    torch._dynamo.reset()
    return found


@pytest.fixture(scope="module")
def found():
    return ranks.run(two_ranks, 2)


def nearly(one, other, **errors):
    torch.testing.assert_close(one, other, equal_nan=True, **errors)


@pytest.mark.parametrize("tokens", ["together", "whole tokens"])
def test_all_ranks_come_to_what_one_process_measures(found, tokens):
    first, second = (result[tokens] for result in found)
    expected = measured(llama())
    assert list(first) == list(second) == list(expected)
    for key, values in first.items():
        nearly(values, second[key], rtol=0, atol=0)
        layer, role, *_ = key.split()
        is_coded = tokens == "together" and role == "input" and layer.endswith(COLUMNS)
        assert bool(values[LOST].isnan().all()) == (is_coded or role == "grad_weight"), key
        if role in ("input", "weight") and (role == "weight" or layer.startswith("layers.0")):
            assert values[SCALE] == expected[key][SCALE], key  # of a row that is cut the larger one is the whole row's
        nearly(values[AMAX], expected[key][AMAX], rtol=0.1, atol=0)
        assert values[NONFINITE] == 0


def test_a_part_is_measured_as_a_layer_of_its_own(found):
    inputs, alone = {}, llama(APART)
    block = alone.layers[0].attention
    for name in ("wq", "wo"):
        getattr(block, name).register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0]}))
    alone(*batch(0, 2))
    for name, dim in (("wq", 0), ("wo", 1)):
        weight = getattr(block, name).weight.detach()
        for rank, result in enumerate(found):
            part = weight.chunk(2, dim)[rank]
            layer = Linear(part.shape[1], part.shape[0], bias=False, recipe="folded")
            x = inputs[name].detach().chunk(2, -1)[rank] if dim else inputs[name].detach()
            with torch.no_grad():
                layer.weight.copy_(part)
            with Telemetry(layer, histograms_every=1) as telemetry:
                layer(x)
                telemetry.step()
                expected = dict(zip(("input", "weight"), torch.from_numpy(telemetry.snapshot()[1]), strict=False))
            for role in expected:
                own = next(v for k, v in result["apart"].items() if k.startswith(f"layers.0.attention.{name} {role}"))
                if (name, role) == ("wq", "input"):  # its codes
                    nearly(own[KEPT], expected[role][KEPT], rtol=0.05, atol=1e-3)
                else:
                    nearly(own, expected[role], rtol=0, atol=0)


def test_compiled_code_measures_the_same(found):
    for result in found:
        for key, values in result["alone"].items():
            compiled = result["compiled"][key]
            if values[LOST].isnan().all() and " input" in key:  # codes made of codes may have half their scale
                assert compiled[LOST].isnan().all()
                assert 0.5 <= compiled[SCALE] / values[SCALE] <= 1
                assert 0.5 <= compiled[AMAX] / values[AMAX] <= 1
                compiled, values = compiled[AS_CODES], values[AS_CODES]
            nearly(compiled, values, rtol=1e-3, atol=1e-6)


def test_a_token_that_is_not_finite_on_one_rank_is_seen_by_all(found):
    for result in found:
        broken = result["broken"]
        for layer in ("attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2"):
            assert broken[f"layers.0.{layer} input []"][NONFINITE] > 0, layer
