from __future__ import annotations

from pathlib import Path

from octavo.monitor.store import RunReader, config_difference, side_by_side, synthetic_run


def test_runs_side_by_side(tmp_path: Path) -> None:
    for name, options in {"a": {}, "b": {"recipe": "block", "twin": False, "steps": 10}}.items():
        synthetic_run(tmp_path / name, layers=1, **{"steps": 20, **options})
    runs = [RunReader(tmp_path / name) for name in ("a", "b")]
    assert {d.key: d.values for d in config_difference(runs)} == {
        "run.steps": (20, 10),
        "run.recipe": ("folded", "block"),
        "run.twin": (True, False),
    }
    assert [len(series) for series in side_by_side(runs, "loss_fp8")] == [20, 10]
    assert [len(series) for series in side_by_side(runs, "loss_bf16")] == [20, 0]
    assert config_difference(runs[:1]) == []
