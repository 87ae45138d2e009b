"""Directories are written whole or not at all, and large models in parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from octavo.errors import ConfigError, OctavoError
from octavo.serving import files

TENSORS = {f"t{number}": torch.full((10,), float(number)) for number in range(5)}  # 40 bytes each


def test_a_large_model_is_written_in_parts_with_an_index(tmp_path):
    sizes = files.write(tmp_path / "out", TENSORS, {}, part_bytes=100)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert sorted(sizes) == [
        *(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    assert index["metadata"]["total_size"] == 200
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], TENSORS[name])


def test_a_tensor_larger_than_a_part_has_one_of_its_own(tmp_path):
    sizes = files.write(tmp_path / "out", TENSORS, {}, part_bytes=1)
    assert len(sizes) == 6


def test_a_small_model_is_one_file_that_all_may_read(tmp_path):
    files.write(tmp_path / "out", TENSORS, {"config.json": {"a": "é"}})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert (tmp_path / "out/config.json").read_text(encoding="utf-8") == '{\n  "a": "é"\n}\n'
    assert (tmp_path / "out/model.safetensors").stat().st_mode == (tmp_path / "out/config.json").stat().st_mode


def test_a_directory_that_is_there_is_replaced_where_asked(tmp_path):
    files.write(tmp_path / "out", TENSORS, {"old.json": {}})
    with pytest.raises(ConfigError, match=r"exists already.*--overwrite"):
        files.write(tmp_path / "out", TENSORS, {})
    files.write(tmp_path / "out", TENSORS, {}, overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_nothing_else_is_ever_replaced(tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "thesis.txt").touch()
    (tmp_path / "file").touch()
    files.write(tmp_path / "out", TENSORS, {})
    (tmp_path / "out" / "checkpoints").mkdir()
    for name in ("runs", "texts", "file", "out"):
        with pytest.raises(ConfigError, match="not an exported model"):
            files.write(tmp_path / name, TENSORS, {}, overwrite=True)
    assert (tmp_path / "texts" / "thesis.txt").exists() and (tmp_path / "runs" / "mine").exists()


def test_what_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(OctavoError, match="No space left"):
        files.write(tmp_path / "out", TENSORS, {"config.json": {}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("killed_at", [1, 2])
def test_a_kill_at_any_time_leaves_a_whole_model(tmp_path, monkeypatch, killed_at):
    files.write(tmp_path / "out", TENSORS, {})
    calls = []

    def killed(real):
        def call(self, target):
            calls.append(self)
            if len(calls) == killed_at:
                raise KeyboardInterrupt
            return real(self, target)

        return call

    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, killed(getattr(Path, name)))
    with pytest.raises(KeyboardInterrupt):
        files.write(tmp_path / "out", TENSORS, {}, overwrite=True)
    monkeypatch.undo()
    (left,) = tmp_path.iterdir()
    assert (
        left.name == ("out", ".old-out")[killed_at - 1]
        and load_file(left / "model.safetensors").keys() == TENSORS.keys()
    )
    files.write(tmp_path / "out", TENSORS, {}, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_to_a_model_stays(tmp_path):
    files.write(tmp_path / "real", TENSORS, {"old.json": {}})
    (tmp_path / "link").symlink_to("real")
    files.write(tmp_path / "link", TENSORS, {}, overwrite=True)
    assert (tmp_path / "link").is_symlink() and sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["model.safetensors"]
