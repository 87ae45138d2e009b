from __future__ import annotations

from pathlib import Path

import numpy as np
from synthetic import synthetic_run

from octavo.lab.monitor.store import RunReader


def test_a_synthetic_run_has_everything_and_a_spike_where_it_says(tmp_path: Path) -> None:
    synthetic_run(tmp_path, layers=15, steps=120, spike_at=77, telemetry_every=10)
    run = RunReader(tmp_path)
    heat = run.heatmap("saturated", "grad_output")
    row, column = np.unravel_index(heat.values.argmax(), heat.values.shape)
    (event,) = run.events(level="warning")
    assert (heat.layers[row], heat.first[column]) == (event.layer, 77) == ("layers.1.attention.wq", event.step)
    assert np.diff(run.scalar("loss_fp8").high).argmax() == 75
    assert run.config and run.plan["layers"] and run.corpus and run.env and run.summary and run.system()
    assert len(run.tensors) == 60 and run.histogram("layers.0.attention.wq", "input") is not None
    assert run.state() == "finished"


def test_it_follows_from_its_seed(tmp_path: Path) -> None:
    for name, seed in {"a": 1, "b": 1, "c": 2}.items():
        synthetic_run(tmp_path / name, layers=2, steps=20, seed=seed)
    a, b, c = (RunReader(tmp_path / name) for name in "abc")
    assert np.array_equal(a.snapshot()[1], b.snapshot()[1], equal_nan=True)
    assert not np.array_equal(a.snapshot()[1], c.snapshot()[1], equal_nan=True)
    assert np.array_equal(a.scalar("loss_fp8").low, b.scalar("loss_fp8").low)
