"""Open a model, its batches and its loss: of a run, a run file, a Python file or a Hugging Face config.

Every command that reads one comes through here: `open_subject` for a new model of any kind, `open_run` for a run with
the weights of a checkpoint, set up as it was trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo import recipes
from octavo._util.config_reader import blaming, merge, read_file
from octavo._util.recipe_names import BASE
from octavo.conversion import Plan, Policy
from octavo.errors import CheckpointError, ConfigError
from octavo.lab.data.loader import Loader
from octavo.lab.guard.ladder import Ladder
from octavo.lab.models import build
from octavo.lab.train import checkpoint as checkpoints
from octavo.lab.train import device as devices
from octavo.lab.train.checkpoint import Checkpoint
from octavo.lab.train.config import RunConfig, assemble, load_file
from octavo.lab.train.inputs import by_copies, copies
from octavo.lab.train.own_model import hugging_face_config, python_file
from octavo.lab.train.setup import (
    Setup,
    convert_as,
    make_states,
    policy_of,
    separator,
    set_up,
    token_files,
    tokenizer_of,
    with_bf16,
)
from octavo.lab.train.state_tensors import restore_tensors
from octavo.lab.train.subject import Shape, Subject, call_model
from octavo.lab.train.train_state import TrainState
from octavo.numerics import Granularity, Quantized, dequantize
from octavo.tensor import FP8Tensor

_ONE_MODEL = {"baseline": False, "compile": "off", "graph": "off", "last_share": 0.0}
"""Settings to load one model."""
_NO_START = {"run": {"start_from": ""}}
"""A checkpoint has all weights, and a stored configuration the shape, whatever is in the directory of these now."""


@dataclass(frozen=True, kw_only=True)
class RunSubject(Subject):
    """A run. `build` makes its model with new weights; `setup` and `states` have those of the checkpoint."""

    config: RunConfig
    directory: Path
    """Directory of the run."""
    checkpoint: Checkpoint | None = None
    """The checkpoint to read weights from; None: new weights."""

    @property
    def trained(self) -> Checkpoint:
        """The checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        if self.checkpoint is None:
            raise CheckpointError(f"{self.directory / 'checkpoints'}: no checkpoint. Name a run that has saved one.")
        return self.checkpoint

    def setup(self) -> Setup:
        """Return the setup of the run with its text; trained layers are in FP8 as in training.

        Raises:
            CheckpointError: the checkpoint is of another model.
            DataError: the run's text no longer exists.
        """
        if self.checkpoint is None:
            return set_up(self.config)
        setup = set_up(self.config, resume=True)
        return replace(setup, plan=_restore(self.checkpoint, self.config, setup.states[0], setup.plan))

    def states(self) -> tuple[TrainState, ...]:
        """Return the models, the BF16 baseline last if `run.baseline` is set. Reads no text.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        states, plan = make_states(self.config, devices.use(self.config.run.device))
        if (found := self.checkpoint) is not None:
            _restore(found, self.config, states[0], plan)
            for baseline in states[1:]:
                restore_tensors(baseline, found.tensors[baseline.name], found.path, optimizer=False)
        return states

    def without_weights(self) -> nn.Module:
        """Return the model on the meta device, with the same layers in FP8 as in training."""
        with torch.device("meta"):
            states, plan = make_states(self.config, torch.device("meta"))
            if policy := _policy_as_trained(self.directory, self.config, plan):
                convert_as(self.config, states[0].model, recipes.load(self.config.run.recipe), policy=policy)
        return states[0].model


def open_subject(target: Path, *, shape: Shape | None = None) -> Subject:
    """Return a model with new weights, its batches and its loss.

    Args:
        target: a Hugging Face config.json, or its directory: a model with random weights. A Python file with `build()`,
            which returns the model; `batches()`, which yields batches; and, unless `model(*batch)` or `model(**batch)`
            returns a loss, `loss(model, batch)`. A run file of `octavo train`, .toml or .json, or the directory of a
            run.
        shape: size of a batch, for a Hugging Face config.

    Raises:
        ConfigError: no such file, or one that is none of these.
        DataError: the text cannot be read, or is too short.
        UnsupportedError: transformers is not installed.
    """
    file = _file_of(target)
    if is_run_file(file):
        return open_run(target, new=True)
    return python_file(file) if file.suffix == ".py" else hugging_face_config(file, shape or Shape())


def open_run(
    target: Path | RunConfig, *, step: int | None = None, new: bool = False, by: str = "", **settings: Any
) -> RunSubject:
    """Return a run for one model, not compiled or captured; a configuration that is given is taken as it is.

    Args:
        target: directory of a run or of one of its checkpoints; with `new`, also a run file. Or a configuration, whose
            directory may have a checkpoint.
        step: step of the checkpoint; by default the newest.
        new: read no checkpoint.
        by: the caller, for error messages.
        settings: keys of the section `run`, in place of the run's. The baseline is kept only if it has weights.

    Raises:
        CheckpointError: the directory has no checkpoint, or none of this step, or it cannot be read.
        ConfigError: the configuration is damaged, or a setting is wrong.
    """
    if isinstance(target, RunConfig):
        newest = None if new else checkpoints.latest(target.run.out / "checkpoints")
        if newest is None:
            return _subject_of(target, target.run.out)
        found = checkpoints.load(newest)
        return _subject_of(by_copies(target, found.state["config"]["run"], found.run), found.run, found)
    if not new:
        found = _find(target, step)
        saved = found.state["config"]
        if settings.get("baseline"):
            settings["baseline"] = {"fp8", "bf16"} <= found.tensors.keys()
        config = _one_model(str(found.path), saved, by, settings)
        return _subject_of(by_copies(config, saved["run"], found.run), found.run, found)
    where, saved = load_file(_file_of(target))
    if not target.is_dir():
        return _subject_of(assemble((where, saved), (by, {"run": settings})), target.with_suffix(""))
    return _subject_of(by_copies(_one_model(where, saved, by, settings), saved["run"], target), target)


def _one_model(where: str, saved: Mapping[str, Any], by: str, settings: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a run's directory for one model, with new values of `run`, set by `by`."""
    return assemble((where, merge(saved, _NO_START)), (by, {"run": {**_ONE_MODEL, **settings}}))


def is_run_file(file: Path) -> bool:
    """Return True for a run file, False for a Python file or a Hugging Face config."""
    return file.suffix != ".py" and (file.suffix != ".json" or "model_type" not in read_file(file))


def _file_of(target: Path) -> Path:
    """Return the file that describes a new model; in a directory config.json."""
    file = target / "config.json" if target.is_dir() else target
    if not file.is_file():
        raise ConfigError(f"{target}: no such file. Name a Hugging Face config.json, a Python file or a run file.")
    return file


def _subject_of(config: RunConfig, directory: Path, found: Checkpoint | None = None) -> RunSubject:
    """Return a run with the batches of one rank, as in training from the first step."""
    data, run = config.data, config.run

    def batches() -> Iterator[Any]:
        tokenizer = tokenizer_of(data)
        files, separate = token_files(config, tokenizer), separator(config, tokenizer)
        return iter(Loader(files.train, run.batch, data.sequence, run.seed, source=files.source, separate=separate))

    return RunSubject(
        name=directory.name,
        build=lambda: build(config.model, run.seed),
        batches=batches,
        loss=call_model,
        tokens=run.batch * data.sequence,
        data=str(data.source),
        decode=lambda model, batch: lambda: model(batch[0][:, :1]),
        config=config,
        directory=directory,
        checkpoint=found,
    )


def _find(run: Path, step: int | None = None) -> Checkpoint:
    """Return the checkpoint at `run`; for the directory of a run the newest one, or that of `step`.

    Raises:
        CheckpointError: there is none, or none of that step.
    """
    kept = [run] if (run / "state.json").exists() else checkpoints.find(run / "checkpoints")
    if not kept:
        raise CheckpointError(
            f"{run}: contains no checkpoint. Name the directory of a run of `octavo train`, which writes one at its"
            " end and every --checkpoint-every steps."
        )
    wanted = kept[-1].name if step is None else checkpoints.name_of(step)
    path = next((path for path in kept if path.name == wanted), None)
    if path is None:
        names = ", ".join(path.name for path in kept)
        raise CheckpointError(f"{run}: contains no checkpoint of step {step}. Checkpoints: {names}.")
    return checkpoints.load(path)


def _restore(found: Checkpoint, config: RunConfig, state: TrainState, plan: Plan | None) -> Plan | None:
    """Load the weights of the checkpoint and convert the layers that were in FP8; return their plan."""
    named = found.tensors["fp8" if "fp8" in found.tensors else "bf16"]  # of the first model, also to be opened in BF16
    named = {**named, **dict(_whole_rows(named))}
    if plan is None:
        restore_tensors(state, named, found.path, optimizer=False)
        return None
    policy = _policy_as_trained(found.run, config, plan)
    own, began = config.run.recipe, found.state["config"]["run"]
    last = found.state.get("recipe", began.get("recipe", BASE))
    last = {began[key]: copy for key, copy in copies(began, found.run).items()}.get(last, last)
    refined = _ladder(last, found.state.get("guard", {}).get("ladder", {}))
    in_bf16 = found.state.get("in_bf16", ())
    if policy is not None or last != own or refined.state_dict() or in_bf16:
        # Stored scales and the storage of weights are those of the recipes that the layers had.
        plan = convert_as(config, state.model, with_bf16(refined.recipe(), in_bf16), policy=policy)
    restore_tensors(state, named, found.path, optimizer=False)
    if last != own:
        scales = found.run / "scales.json"  # of the last step by its own recipe
        config = config.with_run(scales=str(scales)) if scales.exists() else config
        ladder = _ladder(own)
        ladder.stay_in_bf16(refined.in_bf16(), found.step)
        plan = convert_as(config, state.model, with_bf16(ladder.recipe(), in_bf16), policy=policy)
    return plan


def _ladder(recipe: str, state: Mapping[str, Any] | None = None) -> Ladder:
    """Return the recipes of layers as guardrails have refined them, from the state in a checkpoint."""
    ladder = Ladder(recipes.load(recipe), quiet=0)
    ladder.load_state_dict(state or {})
    return ladder


def _policy_as_trained(run: Path, config: RunConfig, plan: Plan | None) -> Policy | None:
    """Return the policy that converts the layers that a run had in FP8; None if it has no plan."""
    known = run / "plan.json"
    if plan is None or not known.exists():
        return None
    with blaming(known):
        trained = {layer["name"] for layer in read_file(known)["layers"] if "fp8" in layer["precision"]}
    stored = policy_of(config, plan.recipe).weights
    return Policy(min_gain=0.0, filter=lambda name, layer: name in trained, weights=stored)


def _whole_rows(named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield FP8 weights that were split within rows, with a scale per part, requantised with one scale per row."""
    for name, scale in named.items():
        weight = name.removesuffix(".scale")
        codes = named.get(f"{weight}.codes") if weight.startswith("model.") else None
        if weight != name and codes is not None and scale.shape[1] > 1:
            parts = Quantized(codes, scale, Granularity(1, codes.shape[1] // scale.shape[1]))
            whole = FP8Tensor.from_tensor(dequantize(parts, torch.float32))
            yield from ((f"{weight}.{part}", tensor) for part, tensor in whole.to_tensors().items())
