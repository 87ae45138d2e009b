from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cli.config import configure
from octavo.errors import ConfigError


def test_preset_under_file_under_flags(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[run]\nsteps = 7\nbatch = 2\n", encoding="utf-8")
    config = configure(file, "tiny", {"run": {"steps": 9}})
    assert (config.run.steps, config.run.batch, config.run.log_every) == (9, 2, 5)
    assert config.run.out == Path("runs/mine")


def test_the_demo_follows_the_device_asked_for() -> None:
    assert configure(None, "demo", {"run": {"device": "cpu"}}) == configure(
        None, "demo-cpu", {"run": {"device": "cpu"}}
    )
    assert configure(None, "demo", {"run": {"device": "cuda:1"}}).data.source == "python-packages"


def test_neither_file_nor_preset() -> None:
    with pytest.raises(ConfigError, match=r"--preset \(demo, .*tiny"):
        configure(None, None, {})
