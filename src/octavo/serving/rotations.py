"""Rotation of inputs in a model that transformers has loaded from an export."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from octavo.errors import UnsupportedError


def rotate_inputs(model: nn.Module, directory: str | Path) -> nn.Module:
    """Rotate the inputs of a loaded model's layers as its export says, in place; return the model.

    transformers reads the codes of compressed-tensors and ignores `transform_config`. Without this call a model that
    was trained by `rotated` multiplies inputs by weights in another basis. A model without rotations stays as it is.

    Args:
        model: what `from_pretrained(directory)` returned.
        directory: the exported model.

    Raises:
        UnsupportedError: a matrix is missing in the files.
    """
    directory = Path(directory)
    known = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("quantization_config") or {}
    groups = known.get("transform_config", {}).get("config_groups", {})
    if not groups:
        return model
    online = {
        name: {**scheme, "apply": [each for each in scheme["apply"] if each["location"] == "input"]}
        for name, scheme in groups.items()
    }  # stored weights are rotated
    transform = import_module("compressed_tensors.transform")
    transform.apply_transform_config(model, transform.TransformConfig.model_validate({"config_groups": online}))
    holders = {f"{name}_input" for name in online}
    wanted = {key for key in model.state_dict() if key.rpartition(".")[0].rpartition(".")[2] in holders}
    matrices = _read(directory, wanted)
    if missing := sorted(wanted - matrices.keys()):
        raise UnsupportedError(
            f"{directory}: has no '{missing[0]}', a matrix of its transform_config. Export it again."
        )
    model.load_state_dict(matrices, strict=False)
    return model


def _read(directory: Path, names: set[str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys() if name in names}  # noqa: SIM118 - no mapping
    return found
