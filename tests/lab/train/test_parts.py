"""Parts of a run's loop that no other file is about."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reporters import Listener

from octavo.lab.monitor.store import RunReader
from octavo.lab.train import train
from octavo.lab.train.config import RunConfig
from octavo.lab.train.events import GroupsMeasured, Saved
from octavo.lab.train.param_groups import group_names
from octavo.lab.train.setup import set_up

Configure = Callable[..., RunConfig]


def test_statistics_of_parameter_groups_are_those_of_the_steps_that_are_due(configure: Configure) -> None:
    config = configure(
        run={"steps": 5, "groups_every": 2, "checkpoint_every": 3, "recipe": "folded", "baseline": False},
        optimizer={"lr_factors": {"tok_embeddings*": 0.5}},
    )
    with pytest.raises(KeyboardInterrupt):
        train(config, reporters=[Listener(Saved, step=3)])
    train(config, resume=True, reporters=[listener := Listener()])
    assert [event.step for event in listener.of(GroupsMeasured)] == [4]
    with RunReader(config.run.out / "run.sqlite") as run:
        found = run.scalars()
        assert "matrices_lr_0.5_weight_variance" in found and "vectors_gradient_amax" in found
        assert found["matrices_gradient_mean"].points()[0].tolist() == [2, 4]
        for key, value in listener.of(GroupsMeasured)[0].values.items():
            assert found[key].points()[1][-1] == pytest.approx(value)


def test_weights_are_measured_before_the_step(configure: Configure) -> None:
    config = configure(run={"steps": 1, "groups_every": 1, "recipe": "bf16"})
    weights = [p.detach().flatten() for p in set_up(config).states[0].parameters.values() if p.ndim > 1]
    train(config, reporters=[listener := Listener()])
    values = listener.of(GroupsMeasured)[0].values
    every = torch.cat(weights).double()
    assert values["matrices_weight_variance"] == pytest.approx(float(every.var(correction=0)))
    assert values["matrices_weight_amax"] == float(every.abs().max())


def test_names_of_groups_are_distinct() -> None:
    groups = [{"params": [torch.zeros(2, 2)], "lr_factor": 1.0}, {"params": [torch.ones(2, 2)], "lr_factor": 1.0}]
    optimizer = torch.optim.SGD([*groups, {"params": [torch.zeros(2)], "lr_factor": 0.1}], lr=1.0)
    assert group_names(optimizer) == ["matrices", "matrices_1", "vectors_lr_0.1"]
