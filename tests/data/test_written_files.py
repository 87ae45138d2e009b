"""Files that earlier commits wrote load, continue and export: `write_files.py` says what is in each archive."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import write_files
from ranks import launch
from ranks import run as run_ranks
from safetensors.torch import load_file
from torch import Tensor
from write_files import digest, loss_of, parameters, set_gradients

import octavo
from octavo import FP8Tensor, Policy
from octavo.distributed import GreedyZeRO, load, merge_state_dicts, shard
from octavo.lab.monitor.store import RunReader
from octavo.nn import Linear
from octavo.optim import AdamW, Lion, Muon, keep_none, unflatten
from octavo.tensor import local

FOLDER = Path(__file__).parent
FIRST, ROTATED = "45e0ae86", "10d58e41"
"""Commits: the first whose files load for ever, and that of the first files of `rotated`."""
RUNS = [*[(FIRST, name) for name in write_files.RUNS], (ROTATED, "rotated")]
MODELS = [*[(FIRST, name) for name, _ in write_files.models(write_files.RECIPES)], (ROTATED, "rotated")]
OPTIMIZERS = [name for name, _ in write_files.optimizers()]
KINDS = {kind.__name__: kind for kind in (AdamW, Lion, Muon)}
Command = Callable[[list[object]], int]
Copy = Callable[..., Path]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the unpacked archives by their commits, to be read only."""
    folders = {}
    for commit in (FIRST, ROTATED):
        folders[commit] = tmp_path_factory.mktemp(commit)
        with tarfile.open(FOLDER / commit / "files.tar.xz") as file:
            file.extractall(folders[commit], filter="data")
    return folders


@pytest.fixture
def copied(written: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    """Return what copies files to the current directory, where the paths in them lead, and returns it."""
    monkeypatch.chdir(tmp_path)

    def copy(commit: str, *names: str) -> Path:
        for name in ("corpus", "cache", *names):
            shutil.copytree(written[commit] / name, tmp_path / name)
        return tmp_path

    return copy


@pytest.fixture(scope="session")
def octavo_command(octavo: Command) -> Command:
    """Return the fixture `octavo` by another name than the package's."""
    return octavo


@pytest.fixture(scope="session")
def is_same_machine(written: dict[str, Path]) -> bool:
    """Return whether PyTorch alone computes here what it did there, bit for bit; elsewhere sums have another order."""
    if torch.get_num_threads() > 1:  # the gradients of norms are sums per thread
        return False
    return [digest(x) for x in write_files.plain()] == torch.load(written[FIRST] / "plain.pt")


@pytest.mark.parametrize(("commit", "name"), RUNS)
def test_a_run_resumes_bit_for_bit(
    commit: str, name: str, written: dict[str, Path], copied: Copy, octavo_command: Command, is_same_machine: bool
) -> None:
    run = copied(commit, f"runs/{name}") / "runs" / name
    before = losses(run)
    assert octavo_command(["train", run, "--resume"]) == 0
    assert losses(run) == pytest.approx(before, rel=0.02)
    weights = write_files.weights_of(run / "checkpoints" / "step-000008")
    digests = json.loads((written[commit] / "runs" / f"{name}.json").read_text())
    assert weights.keys() == digests.keys()
    if is_same_machine:
        assert losses(run) == before
        assert {name: digest(x) for name, x in weights.items()} == digests


def losses(run: Path) -> list[float]:
    """Return the losses of a run's steps, which its two records agree about."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    values = [row["loss_fp8"] for row in rows if "loss_fp8" in row]
    stored = RunReader(run).scalars(["loss_fp8"])["loss_fp8"]
    assert list(stored.first) == list(range(1, 9)) and list(stored.low) == values
    return values


def test_a_sharded_run_resumes_on_two_ranks_and_loads_on_one(
    written: dict[str, Path], copied: Copy, is_same_machine: bool
) -> None:
    run = copied(FIRST, "runs/pair") / "runs" / "pair"
    one = write_files.weights_of(run / "checkpoints" / "step-000004")
    digests = json.loads((written[FIRST] / "runs" / "pair.json").read_text())
    assert one.keys() == digests.keys()
    assert launch(resume, 2, str(run)).code == 0
    losses(run)
    weights = write_files.weights_of(run / "checkpoints" / "step-000008")
    assert {name: x.shape for name, x in weights.items()} == {name: x.shape for name, x in one.items()}
    assert {name: digest(x) for name, x in one.items()} != digests
    if is_same_machine:
        assert {name: digest(x) for name, x in weights.items()} == digests


def resume(run: str) -> None:
    """Be one rank of a resumed run."""
    from octavo.lab.cli.main import main

    main(["train", run, "--resume"])


@pytest.mark.parametrize(("run", "format"), [("folded", "compressed-tensors"), ("lora", "plain")])
def test_a_run_exports_what_it_did(
    run: str, format: str, written: dict[str, Path], copied: Copy, octavo_command: Command, is_same_machine: bool
) -> None:
    folder, there = copied(FIRST, f"runs/{run}"), written[FIRST] / "exports" / format
    assert octavo_command(["export", folder / "runs" / run, "--format", format, "--out", folder / "export"]) == 0
    assert {path.name for path in (folder / "export").iterdir()} == {path.name for path in there.iterdir()}
    if format != "plain" or is_same_machine:  # low-rank updates are multiplied
        for path in there.iterdir():
            assert (folder / "export" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("format", ["compressed-tensors", "fp8", "plain"])
def test_an_export_is_of_the_format_that_today_writes(format: str, written: dict[str, Path], tmp_path: Path) -> None:
    there = written[FIRST] / "exports" / format
    model, _ = write_files.llama({"fp8": "block"}.get(format, "folded"), fuse=False)
    octavo.export(model, tmp_path / "export", format)
    for folder in (there, tmp_path / "export"):
        assert {"config.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}
    then, now = (load_file(folder / "model.safetensors") for folder in (there, tmp_path / "export"))
    assert {name: x.dtype for name, x in then.items() if "lm_head" not in name} == {
        name: x.dtype for name, x in now.items() if "lm_head" not in name
    }
    keys = [json.loads((folder / "config.json").read_text()) for folder in (there, tmp_path / "export")]
    assert keys[0].get("quantization_config", {}).keys() == keys[1].get("quantization_config", {}).keys()


def test_telemetry_and_scales_of_a_run(written: dict[str, Path]) -> None:
    for name in write_files.RUNS:
        reader = RunReader(written[FIRST] / "runs" / name)
        heat = reader.heatmap("amax", "input")
        assert len(heat.layers) > 0 and (heat.values[:, -1] > 0).all()
        assert [session.outcome for session in reader.sessions] == ["finished"]


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("commit", "name"), MODELS)
def test_a_pickled_model_computes_and_trains_as_it_did(
    commit: str, name: str, written: dict[str, Path], is_same_machine: bool, tmp_path: Path
) -> None:
    folder = written[commit] / "models"
    kept = torch.load(folder / f"{name}.expected.pt")
    saved = torch.load(folder / f"{name}.pt", weights_only=False)
    torch.save(saved, tmp_path / "again.pt")
    for content in (saved, torch.load(tmp_path / "again.pt", weights_only=False)):
        model = content["model"]
        loss = loss_of(model, kept["batch"])
        loss.backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        assert gradients.keys() == kept["norms"].keys()
        assert float(loss.detach()) == pytest.approx(float(kept["loss"]), rel=1e-2)
        for key, gradient in gradients.items():
            assert float(gradient.float().norm()) == pytest.approx(float(kept["norms"][key]), rel=0.1, abs=1e-6)
        if is_same_machine:
            assert torch.equal(loss, kept["loss"])
            assert {key: digest(gradient) for key, gradient in gradients.items()} == kept["digests"]
        if "optimizer" in content:
            before = [p.detach().clone() for p in model.parameters()]
            content["optimizer"].step()
            assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_pickled_model_is_in_fp8(written: dict[str, Path]) -> None:
    for commit, name in MODELS:
        model = torch.load(written[commit] / "models" / f"{name}.pt", weights_only=False)["model"]
        layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
        assert layers and all(layer.recipe.is_fp8 for layer in layers), name
        if name == "fp8-weights":
            assert all(isinstance(layer.weight, FP8Tensor) for layer in layers)
        if name == "delayed":
            assert octavo.scales(model).is_known


# --- optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["state_dict", "tensors", "pickled"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_continues_bit_for_bit(
    name: str, through: str, written: dict[str, Path], is_same_machine: bool
) -> None:
    saved = torch.load(written[FIRST] / "optimizers" / f"{name}.pt", weights_only=False)
    expected = torch.load(written[FIRST] / "optimizers" / f"{name}.expected.pt")
    if through == "pickled":
        optimizer, named = saved["pickled"]["optimizer"], list(saved["pickled"]["parameters"].items())
    else:
        named = restored(saved["weights"])
        optimizer = KINDS[saved["class"]](named, lr=0.125, states=name.partition("-")[2], keep=keep_none, clip=1.0)
        state = saved["state_dict"] if through == "state_dict" else unflatten(saved["tensors"], saved["rest"])
        optimizer.load_state_dict(state)
    for step in (2, 3):
        set_gradients(named, step)
        optimizer.step()
    for key, parameter in named:
        if is_same_machine or not name.startswith("muon"):  # the others multiply no matrices
            assert torch.equal(parameter, expected[key]), key
        torch.testing.assert_close(parameter.detach(), expected[key], rtol=0.05, atol=0.05)


def restored(weights: dict[str, Tensor]) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of `write_files` with these values."""
    named = parameters()
    with torch.no_grad():
        for key, parameter in named:
            parameter.copy_(weights[key])
    return named


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_exported_states_are_imported(name: str, written: dict[str, Path]) -> None:
    saved = torch.load(written[FIRST] / "optimizers" / f"{name}.pt", weights_only=False)
    optimizer = KINDS[saved["class"]](restored(saved["weights"]), lr=0.125, states="fp32", keep=keep_none)
    optimizer.import_state_dict(saved["exported"])
    for part, now in parts(optimizer.export_state_dict()).items():
        for number, state in parts(saved["exported"])[part]["state"].items():
            assert state.keys() == now["state"][number].keys()
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(now["state"][number][key]), torch.as_tensor(value)), (number, key)


def parts(exported: dict[str, Any]) -> dict[str, Any]:
    """Return the state dicts of an export by optimizer; that of Muon has two."""
    return {"": exported} if "state" in exported else exported


def test_states_of_a_wrapped_optimizer_on_one_rank_and_on_two(written: dict[str, Path]) -> None:
    folder = written[FIRST] / "optimizers"
    whole = torch.load(folder / "greedy.full.pt")
    merged = merge_state_dicts(torch.load(folder / f"greedy.rank-{rank}.pt")["state_dict"] for rank in range(2))
    results = []
    for state in (whole["state_dict"], merged):
        named = restored(whole["weights"])
        optimizer = AdamW(named, lr=1e-2, states="fp8", keep=keep_none)
        optimizer.load_state_dict(state)
        set_gradients(named, 2)
        optimizer.step()
        results.append([parameter.detach() for _, parameter in named])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    for own in run_ranks(continue_wrapped, 2, str(folder)):
        assert all(torch.equal(a, b) for a, b in zip(own, results[0], strict=True))


def continue_wrapped(rank: int, ranks: int, folder: str) -> list[Tensor]:
    """Return the weights after a step by two ranks, each with the state that it wrote."""
    saved = torch.load(f"{folder}/greedy.rank-{rank}.pt")
    named = restored(saved["weights"])
    optimizer = GreedyZeRO(AdamW(named, lr=1e-2, states="fp8", keep=keep_none), reduction=None)
    optimizer.load_state_dict(saved["state_dict"])
    set_gradients(named, 2)
    optimizer.step()
    return [parameter.detach() for _, parameter in named]


# --- several ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sharded_model_has_the_codes_of_its_files(ranks: int, written: dict[str, Path]) -> None:
    folder = written[FIRST] / "shards"
    written_rows = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    results = run_ranks(load_shards, ranks, str(folder))
    assert [steps for steps, _ in results] == [2] * ranks
    for name in results[0][1]:
        here = torch.cat([codes[name] for _, codes in results])
        assert torch.equal(here, torch.cat([rows[f"fp8.{name}.codes"] for rows in written_rows])), name


def load_shards(rank: int, ranks: int, folder: str) -> tuple[int, dict[str, Tensor]]:
    """Return the step and this rank's codes of a checkpoint; a further step changes them."""
    model, batches = write_files.llama("folded", weights="fp8")
    shard(model)
    optimizer = AdamW(model.named_parameters(), lr=1e-2, states="fp8", keep=write_files.keep_vectors)
    extra = load(folder, model, optimizer)
    codes = {
        name: local(p).codes.view(torch.uint8).clone()
        for name, p in model.named_parameters()
        if isinstance(local(p), FP8Tensor)
    }
    assert codes
    loss_of(model, batches[2]).backward()
    optimizer.step()
    assert not any(optimizer.state[p]["step"] != 3 for p in model.parameters())
    return int(extra["steps"]), codes


# --- other files ------------------------------------------------------------------------------------------------------


def test_pickled_recipes_and_policies(written: dict[str, Path]) -> None:
    saved = torch.load(written[FIRST] / "pickles.pt", weights_only=False)
    assert saved["recipes"] == [octavo.recipes.load(name) for name in write_files.RECIPES]
    assert saved["policy"] == Policy(weights="fp8")


def test_recipe_files_and_maps(written: dict[str, Path]) -> None:
    mine = octavo.recipes.load(str(written[FIRST] / "recipe.toml"))
    assert mine.modules["layers.0.attention.*"].fprop == octavo.recipes.load("tensorwise").fprop
    assert octavo.recipes.load(str(written[FIRST] / "map.toml")).modules


def test_a_calibration_is_that_of_the_model_that_it_was_made_of(written: dict[str, Path]) -> None:
    model, _ = write_files.llama("bf16")
    octavo.convert(model, "static", policy=Policy(min_gain=0), scales=written[FIRST] / "scales.json")
    saved = torch.load(written[FIRST] / "models" / "static.pt", weights_only=False)["model"]
    scales, then = octavo.scales(model).state_dict(), octavo.scales(saved).state_dict()
    assert scales.keys() == then.keys()
    for name, tensor in scales.items():  # the scale; behind it are the largest values of two steps
        assert tensor[0] > 0 and tensor[0] == then[name][0], name
