"""What `train` and `plan` share: where a configuration comes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.train.config import RunConfig, assemble, load_file, load_preset, presets


def configure(file: Path | None, preset: str | None, settings: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a preset, under that of a file, under that of flags.

    Raises:
        ConfigError: neither file nor preset is given, or one of the three is wrong.
    """
    if file is None and preset is None:
        known = ", ".join(["demo", *presets()])
        raise ConfigError(f"nothing to train: name a run file, or a preset with --preset ({known}).")
    layers = []
    if preset is not None:
        device = settings.get("run", {}).get("device", "auto")
        layers.append(load_preset(preset, cuda=preset == "demo" and _wants_cuda(device)))
    if file is not None:
        layers.append(load_file(file))
    return assemble(*layers, ("command line", settings))


def _wants_cuda(device: str) -> bool:
    if device != "auto":
        return device.startswith("cuda")
    import torch

    return torch.cuda.is_available()
