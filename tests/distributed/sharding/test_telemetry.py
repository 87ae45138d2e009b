"""Telemetry of a sharded model: weights arrive as codes, and all ranks come to the same values."""

import numpy as np
import ranks
import torch
import torch.distributed as dist
from sharded import FP32, llama, step_sharded
from torch import nn

from octavo.distributed import shard
from octavo.kernels.sample import STATS
from octavo.nn import Linear
from octavo.nn.telemetry import Telemetry

STEPS = 2


def watch(rank, count):
    """Return the statistics of each step over all ranks, and of this rank."""
    found = {}
    for name, group in (("together", dist.new_group()), ("alone", None)):
        model = llama("folded")
        shard(model, mp_policy=FP32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        telemetry = Telemetry(model, histograms_every=2, group=group)
        losses = [step_sharded(model, optimizer, step, rank, count) for step in range(STEPS)]
        telemetry.wait()
        taken = list(iter(telemetry.snapshot, None))
        found[name] = {
            "losses": losses,
            "steps": [step for step, _ in taken],
            "values": torch.tensor(np.stack([values for _, values in taken])),
            "sampled": torch.tensor(telemetry.sampled),
            "histograms": torch.tensor(telemetry.histograms),
            "rows": [(row.layer, row.role) for row in telemetry.rows],
            "layers": [name for name, module in model.named_modules() if isinstance(module, Linear | nn.Linear)],
            "not watched": telemetry.not_watched,
        }
        telemetry.detach()
    return found


def test_all_ranks_come_to_the_same_values():
    results = ranks.run(watch, 2)
    first, second = (result["together"] for result in results)
    alone = [result["alone"] for result in results]
    assert first["losses"] == alone[0]["losses"]  # nothing of it is in the training
    assert first["not watched"] == {}
    assert len({layer for layer, _ in first["rows"]}) >= 7
    assert first["steps"] == [1, 2]
    for key in ("values", "sampled", "histograms"):
        assert torch.equal(first[key].nan_to_num(-1.0), second[key].nan_to_num(-1.0)), key
    for column, name in enumerate(STATS):
        ours, parts = first["values"][..., column], torch.stack([part["values"][..., column] for part in alone])
        if name in ("amax", "scale", "nonfinite"):
            expected = torch.fmax(*parts)
        elif name in ("flushed", "subnormal", "saturated", "mean"):
            expected = parts.mean(0)  # ranks have as many tokens, and rows of each weight
        else:
            continue
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-9, equal_nan=True, msg=name)
    assert torch.equal(first["sampled"], alone[0]["sampled"] + alone[1]["sampled"])
    assert torch.equal(first["histograms"], alone[0]["histograms"] + alone[1]["histograms"])
    flushed, variance = STATS.index("flushed"), STATS.index("variance")
    for (_, role), values in zip(first["rows"], first["values"][0], strict=True):
        assert values[variance] > 0, role
        assert bool(values[flushed].isnan()) == (role in ("weight", "grad_weight"))  # only the codes are here
