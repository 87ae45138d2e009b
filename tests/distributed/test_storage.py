"""Files of sharded checkpoints: safe, complete and unchanged, or refused with the name of the file."""

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, state_dict_saver

from octavo._util.checksums import file_entry
from octavo.distributed import storage
from octavo.errors import CheckpointError, NonFiniteError

FILE = "shard-00001-model-00001-of-00001.safetensors"


def tensors() -> dict[str, Tensor]:
    return {
        "model.w": torch.arange(12.0).reshape(3, 4),
        "model.codes": torch.arange(6).to(torch.float8_e4m3fn),
        "model.mask": torch.tensor([0.0, -torch.inf]),
        "optimizer.w.step": torch.tensor(3.0),
        "optimizer.w.count": torch.tensor([1, 2], dtype=torch.int16),
        "optimizer.empty": torch.empty(0, 4),
    }


def empty_like(folder: Path) -> dict[str, Tensor]:
    return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in storage.shapes(folder).items()}


def is_finite(name: str) -> bool:
    return name != "model.mask"


def read(folder: Path, into: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    storage.check_files(folder, is_finite)
    found = empty_like(folder) if into is None else into
    storage.read(folder, found, alone=True)
    return found


def rewrite(folder: Path, changed: dict[str, Tensor]) -> None:
    """Replace the tensors of a checkpoint and their checksum: one put together by hand."""
    offsets = json.dumps({name: {"saved_offsets": [0] * t.dim()} for name, t in changed.items()})
    save_file(changed, folder / FILE, metadata={"DCP_SHARDING_INFO": offsets})
    (folder / "index.json").write_text(json.dumps({"files": {FILE: file_entry(folder / FILE)}}), encoding="utf-8")


def test_what_is_written_is_read_in_every_dtype(tmp_path: Path) -> None:
    storage.write(tmp_path, tensors())
    found = read(tmp_path)
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_a_folder_may_have_others_in_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    storage.write(tmp_path, tensors(), {"notes.txt": "ä"})
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "ä"
    assert read(tmp_path).keys() == tensors().keys() and {*storage.read_index(tmp_path)} == {FILE, "notes.txt"}


def test_tied_and_strided_tensors_are_written_whole(tmp_path: Path) -> None:
    x = torch.arange(12.0).reshape(3, 4)
    saved = {"tied": x, "other": x, "transposed": x.t(), "part": x[:, :2], "rows": x[1:]}
    storage.write(tmp_path, saved)
    found = read(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())


def test_large_checkpoints_are_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "FILE_BYTES", 20)
    storage.write(tmp_path, tensors())
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert torch.equal(read(tmp_path)["model.w"], tensors()["model.w"])
    monkeypatch.undo()
    storage.write(tmp_path, tensors())  # again, in fewer files
    assert [path.name for path in tmp_path.glob("*.safetensors")] == [FILE]


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    storage.write(tmp_path, tensors())
    whole = (tmp_path / FILE).read_bytes()
    for at in range(0, len(whole), 37):
        (tmp_path / FILE).write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match=rf"{FILE}: damaged: its SHA-256"):
            storage.check_files(tmp_path, is_finite)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / FILE).unlink(), rf"{FILE}: cannot be read \(No such file"),
        (lambda f: (f / FILE).write_bytes(b"half"), rf"{FILE}: truncated, 4 of"),
        (lambda f: (f / "index.json").unlink(), r"index.json: cannot be read .*not complete"),
        (lambda f: (f / "index.json").write_text("[3]"), r"index.json: truncated or malformed"),
        (lambda f: save_file({}, f / "shard-00009.safetensors"), r"shard-00009.safetensors: is not in .*index.json"),
    ],
)
def test_files_that_are_not_as_written_are_named(tmp_path: Path, change: object, message: str) -> None:
    storage.write(tmp_path, tensors())
    change(tmp_path)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path)


def test_tensors_of_another_dtype_are_not_converted(tmp_path: Path) -> None:
    storage.write(tmp_path, tensors())
    asked = empty_like(tmp_path)
    asked["model.w"] = asked["model.w"].bfloat16()
    with pytest.raises(CheckpointError, match=r"'model.w' is torch.float32 there and torch.bfloat16 here"):
        read(tmp_path, asked)


def test_missing_tensors_and_parts_are_named(tmp_path: Path) -> None:
    storage.write(tmp_path, tensors())
    asked = empty_like(tmp_path)
    changed = load_file(tmp_path / FILE)
    del changed["optimizer.w.step"]
    rewrite(tmp_path, changed)
    with pytest.raises(CheckpointError, match=r"optimizer\.w\.step"):
        read(tmp_path, asked)
    offsets = json.dumps({"model.w": {"saved_offsets": [1, 0]}})  # the first row is nowhere
    save_file({"model.w": torch.ones(2, 4)}, tmp_path / FILE, metadata={"DCP_SHARDING_INFO": offsets})
    with pytest.raises(CheckpointError, match=r"'model.w' is incomplete: 8 of 12 values"):
        storage.shapes(tmp_path)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_named(tmp_path: Path, value: float) -> None:
    broken = tensors()
    broken["optimizer.w.step"] = torch.tensor(value)
    storage.write(tmp_path, broken)
    with pytest.raises(NonFiniteError, match=r"1 of 1 values of 'optimizer.w.step' are NaN"):
        read(tmp_path)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("exploded"),)  # type: ignore[return-value]


def test_the_pickle_of_earlier_versions_is_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "sharded"
    storage.write(folder, tensors())
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb()))
    assert torch.equal(read(folder)["model.w"], tensors()["model.w"])
    (folder / "index.json").unlink()
    with pytest.raises(CheckpointError, match=r"with a pickle as index.* convert it once: docs/how-to"):
        read(folder)
    assert not (tmp_path / "exploded").exists()


def test_the_conversion_in_the_docs_keeps_every_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/how-to/train-on-many-gpus.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(import json\nimport shutil\n.*?)```", page, re.DOTALL)
    folder = tmp_path / "runs/mine/checkpoints/step-000100/sharded"
    folder.mkdir(parents=True)
    state_dict_saver.save(tensors(), storage_writer=FileSystemWriter(folder))
    (folder.parent / "state.json").write_text(json.dumps({"format": 1, "files": {"sharded/.metadata": 3}}))
    exec(compile(code, "docs", "exec"), {})
    found = read(folder)
    for name, tensor in tensors().items():
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    files = json.loads((folder.parent / "state.json").read_text())["files"]
    assert files == {f"sharded/{name}": (folder / name).stat().st_size for name in ("index.json", FILE)}
