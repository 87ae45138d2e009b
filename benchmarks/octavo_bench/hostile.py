"""Folders, files and writers that mislead: further cases of `octavo_bench.campaign`.

Commands run in a copy of a workspace with a tiny run (`octavo_bench.command_line.workspace`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import _find_shared_tensors, load_file, save_file, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import octavo
from octavo.lab.data import ByteTokenizer, prepare
from octavo.lab.data.chat import ChatFormat
from octavo.nn.telemetry import STATS, Telemetry
from octavo_bench.campaign import Case, Outcome, case_of
from octavo_bench.command_line import run, workspace
from octavo_bench.silence import Pair, converted, equal, right

SECONDS = 5
"""Seconds within which a bad file must be refused, on a busy machine."""


@cache
def _good() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="octavo-")
    workspace(Path(folder.name))
    return folder


@contextlib.contextmanager
def _work() -> Iterator[Path]:
    """Make a copy of the workspace the working directory."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder, contextlib.chdir(folder):
        shutil.copytree(_good().name, folder, symlinks=True, dirs_exist_ok=True)
        yield Path(folder)


def _refused(command: str, *words: str) -> Outcome:
    """Run a command that must be refused in one line that has one of the words."""
    ended = run(command.split(), seconds=SECONDS)
    if not ended.code:
        return "silent"
    if ended.code < 0:
        return "lost"
    return "refused" if not ended.fault and any(word in ended.error for word in words) else "unclear"


# --- chat data ------------------------------------------------------------------------------------------------------

_CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_ANSWER = {"role": "assistant", "content": "one"}
_ASKED = [{"role": "user", "content": "1?"}]


def _answers(messages: list[dict[str, Any]], template: str = _CHATML) -> list[str]:
    return [text for text, is_answer in ChatFormat(sequence=64, template=template).spans(messages) if is_answer]


def _rendered(template: str, **config: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "tokenizer.json")
        place.write_text("{}")
        place.with_name("tokenizer_config.json").write_text(json.dumps({"chat_template": template, **config}))
        return ChatFormat.of(str(place), 64).text(_ASKED)


@case_of("chat data", "an answer of weight 0", "weight")
def _weight_zero(draw: Random) -> Outcome:
    return right(_answers([*_ASKED, _ANSWER | {"weight": draw.choice((0, 0.0))}, *_ASKED, _ANSWER]) == ["one</s>"])


@case_of("chat data", "a field that nothing reads", "weights", "train")
def _unknown_field(draw: Random) -> Outcome:
    answers = ({"role": "assistant", "content": str(n), draw.choice(("weights", "train")): False} for n in range(40))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "chat.jsonl")
        source.write_text("".join(json.dumps({"messages": [*_ASKED, answer]}) + "\n" for answer in answers))
        prepare(str(source), ByteTokenizer(), Path(folder, "cache"), 0.2, chat=ChatFormat(sequence=64))
    return "silent"


for _token in ("bos", "eos", "pad", "unk", "cls", "sep"):

    @case_of("chat data", f"{_token}_token in a template", f"{_token}_token")
    def _special(draw: Random, name: str = f"{_token}_token") -> Outcome:
        return right(_rendered(f"{{{{ {name} }}}}x", **{name: draw.choice(("<t>", {"content": "<t>"}))}) == "<t>x")


@case_of("chat data", "strftime_now in a template", "strftime_now")
def _strftime(draw: Random) -> Outcome:
    return right(_rendered("{{ strftime_now('%Y') }}").startswith("2"))


@case_of("chat data", "generation tags in a template")
def _generation(draw: Random) -> Outcome:
    answer = "{{ m.content }}</s>"
    tagged = "{% generation %}" + answer + "{% endgeneration %}"
    marked = _CHATML.replace(answer, f"{{% if m.role == 'user' %}}{answer}{{% else %}}{tagged}{{% endif %}}")
    return "held" if _answers([*_ASKED, _ANSWER], marked) == ["one</s>"] else "silent"


@case_of("chat data", "an empty answer")
def _empty_answer(draw: Random) -> Outcome:
    return right(_answers([*_ASKED, _ANSWER | {"content": ""}, *_ASKED, _ANSWER]) == ["</s>", "one</s>"])


@case_of("chat data", "tool calls in several rounds under a template that drops thoughts")
def _tool_rounds(draw: Random) -> Outcome:
    thinking = _CHATML.replace(
        "{{ m.content }}",
        "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1].lstrip() }}{% endif %}",
    )
    call = {"role": "assistant", "content": "<think>so</think>call"}
    rounds = [turn for _ in range(draw.choice((2, 3))) for turn in (call, {"role": "tool", "content": "7"})]
    answers = _answers([*_ASKED, *rounds, _ANSWER], thinking)
    return right(answers == ["call</s>"] * (len(rounds) // 2) + ["one</s>"])


@case_of("chat data", "bos_token in special_tokens_map.json")
def _other_file(draw: Random) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "tokenizer.json")
        place.write_text("{}")
        place.with_name("tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ bos_token }}x"}))
        place.with_name("special_tokens_map.json").write_text(json.dumps({"bos_token": "<t>"}))
        return right(ChatFormat.of(str(place), 64).text(_ASKED) == "<t>x")


@case_of("held-out loss", "batch parts")
def _accumulated(draw: Random) -> Outcome:
    batch = draw.choice((6, 8))
    with _work() as place:
        losses = []
        for parts in (1, 2, batch):
            flags = f"--batch {batch} --accumulate {parts} --steps 1 --out {parts} --device cpu --run.eval-tokens 2000"
            if run(f"train run.toml {flags}".split()).code:
                return "unclear"
            losses.append(json.loads(Path(place, str(parts), "summary.json").read_text())["heldout_loss_fp8"])
    return right(max(losses) - min(losses) < 1e-5)


# --- telemetry ------------------------------------------------------------------------------------------------------


@case_of("telemetry", "a NaN token is none of a weight")
def _nan_token(draw: Random) -> Outcome:
    model = converted(Pair())
    x = torch.randn(8, 48)
    x[draw.choice((0, 7)), draw.choice((0, 47))] = torch.nan
    with Telemetry(model) as telemetry:
        model(x).sum().backward()
        telemetry.step()
        telemetry.wait()
        _, values = telemetry.snapshot() or (0, torch.empty(0))
        counts = {row.role: values[number, STATS.index("nonfinite")] for number, row in enumerate(telemetry.rows)}
    return right(bool(counts["weight"] == 0 and counts["input"] > 0))


# --- folders --------------------------------------------------------------------------------------------------------


@case_of("folders", "--overwrite of a checkpoint folder that is a link")
def _linked(draw: Random) -> Outcome:
    with _work() as place:
        elsewhere = place / "elsewhere"
        folder = place / draw.choice(("run/checkpoints", "run/checkpoints/step-000002"))
        folder.rename(elsewhere)
        folder.symlink_to(elsewhere)
        ended = run(["train", "run.toml", "--overwrite", "--steps", "1", "--device", "cpu"])
        if ended.code:
            return "refused" if "link" in ended.error else "unclear"
        return right([path.name for path in (place / "run/checkpoints").iterdir()] == ["step-000001"])


def _state(**changed: Any) -> None:
    path = Path("run/checkpoints/step-000002/state.json")
    state = json.loads(path.read_text())
    del state["sha256"]
    state |= changed
    state["sha256"] = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(state))


_RESUME = "train run/config.json --resume --steps 3 --device cpu"

for _step in (-3, True, 18.7, 10**9):

    @case_of("folders", f"state.json of step {_step}")
    def _bad_step(draw: Random, step: Any = _step) -> Outcome:
        with _work():
            _state(step=step)
            return _refused(_RESUME, "state.json", "step-000002")


@case_of("folders", "state.json without its checksum")
def _no_checksum(draw: Random) -> Outcome:
    with _work():
        path = Path("run/checkpoints/step-000002/state.json")
        state = json.loads(path.read_text())
        state.pop("sha256")
        path.write_text(json.dumps(state))
        return _refused(_RESUME, "state.json")


for _target_step in (5, -5, 99, True, "1"):

    @case_of("folders", f"rolled-back.json of step {_target_step!r}")
    def _rolled_back(draw: Random, step: Any = _target_step) -> Outcome:
        with _work():
            Path("run/checkpoints/step-000002/rolled-back.json").write_text(json.dumps({"step": step}))
            return _refused(_RESUME, "rolled-back.json")


for _value in ("NaN", "-1e-3", "1e400"):

    @case_of("folders", f"a learning rate of {_value} in config.json")
    def _bad_rate(draw: Random, value: str = _value) -> Outcome:
        with _work():
            path = Path("run/config.json")
            config = json.loads(path.read_text())
            config["optimizer"]["lr"] = -0.125
            path.write_text(json.dumps(config).replace("-0.125", value))
            return _refused(_RESUME, "lr", "config.json")


_EVAL = "eval served --data text.txt --tokens 64 --device cpu"
_START = "train run.toml --start-from served --steps 1 --out other --device cpu"

for _target in ("../outside.safetensors", "{place}/outside.safetensors", "served/../../outside.safetensors"):

    @case_of("folders", f"weight_map names {_target}")
    def _escapes(draw: Random, target: str = _target) -> Outcome:
        with _work() as place:
            weights = Path("served/model.safetensors")
            names = load_file(weights)
            weights.rename("outside.safetensors")
            index = {"weight_map": dict.fromkeys(names, target.format(place=place))}
            Path("served/model.safetensors.index.json").write_text(json.dumps(index))
            return _refused(_START, "weight_map", "model.safetensors.index.json")


for _file, _command in (
    ("served/model.safetensors", _EVAL), ("served/config.json", _EVAL), ("run.toml", "plan run.toml"),
    ("recipe.toml", "recipes recipe.toml"), ("run/checkpoints/step-000002/state.json", _RESUME),
    ("text.txt", "eval run --data text.txt --tokens 64 --device cpu"), ("run/metrics.jsonl", _RESUME),
    ("scales.json", "calibrate --undo scales.json"), ("run/run.sqlite", "report run"),
    ("run/plan.json", "eval run --tokens 64 --device cpu"),
):  # fmt: skip

    @case_of("folders", f"{_file} is a FIFO")
    def _fifo(draw: Random, file: str = _file, command: str = _command) -> Outcome:
        with _work():
            Path(file).unlink()
            os.mkfifo(file)
            return _refused(command, Path(file).name)


# --- programs -------------------------------------------------------------------------------------------------------


def _git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], check=True, capture_output=True)


_PROGRAMS = {
    "core.fsmonitor": ("core.fsmonitor", "touch {marker}; false"),
    "a filter": ("filter.f.clean", "touch {marker}; cat"),
    "a process filter": ("filter.f.process", "touch {marker}; cat"),
    "core.hooksPath": ("core.hooksPath", "hooks"),
}


def _runs_nothing(setting: str, program: str, use: Callable[[], object]) -> Case:
    def case(draw: Random) -> Outcome:
        with _work() as place:
            marker = place / "marker"
            Path("tracked.txt").write_text("1\n")
            Path(".gitattributes").write_text("*.txt filter=f\n")
            _git("init", "-q")
            _git("add", "tracked.txt")
            _git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "one")
            _git("config", setting, program.format(marker=marker))
            Path("tracked.txt").write_text("2\n")
            where = place / draw.choice((".", "served"))
            with contextlib.chdir(where):
                use()
            return "executed" if marker.exists() else "held"

    return case


def _watched() -> None:
    octavo.Monitor(nn.Linear(2, 2), "watched").close()


def _trained() -> None:
    folder = "." if Path("run.toml").exists() else ".."
    run(f"train {folder}/run.toml --steps 1 --out other --device cpu".split())


for _name, (_setting, _program) in _PROGRAMS.items():
    for _use in (_trained, _watched):
        case_of("programs", f"{_name}, {_use.__name__[1:]}")(_runs_nothing(_setting, _program, _use))


# --- writers of FP8 weights -----------------------------------------------------------------------------------------


def _by_safetensors(model: nn.Module, path: Path) -> dict[str, Tensor]:
    save_model(model, str(path / "m.safetensors"))
    return load_file(path / "m.safetensors")


def _by_state_dict(model: nn.Module, path: Path) -> dict[str, Tensor]:
    save_file(model.state_dict(), path / "m.safetensors")
    return load_file(path / "m.safetensors")


def _by_dcp(model: nn.Module, path: Path) -> dict[str, Tensor]:
    save_dcp(model.state_dict(), checkpoint_id=path / "dcp")
    found = {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}
    load_dcp(found, checkpoint_id=path / "dcp")
    return found


def _by_torch(model: nn.Module, path: Path) -> dict[str, Tensor]:
    torch.save(model.state_dict(), path / "m.pt")
    loaded: dict[str, Tensor] = torch.load(path / "m.pt", weights_only=True)
    return loaded


def _by_accelerate(model: nn.Module, path: Path) -> dict[str, Tensor]:
    from accelerate import Accelerator

    Accelerator(cpu=True).save_model(model, path)
    return load_file(path / "model.safetensors")


for _writer in (_by_safetensors, _by_state_dict, _by_dcp, _by_torch, _by_accelerate):

    @case_of("writers of FP8 weights", _writer.__name__[1:].replace("_", " "))
    def _written(draw: Random, writer: Callable[[nn.Module, Path], dict[str, Tensor]] = _writer) -> Outcome:
        model = converted(Pair(), weights="fp8")
        with tempfile.TemporaryDirectory() as folder:
            found = writer(model, Path(folder))
        names = {name for name, _ in model.named_parameters()}
        loaded = converted(Pair(), weights="fp8")
        loaded.load_state_dict({name: found[name] for name in names}, strict=True)
        x = torch.randn(5, 48)
        return equal(loaded(x), model(x))


@case_of("writers of FP8 weights", "distinct weights are taken as tied")
def _tied(draw: Random) -> Outcome:
    """As libraries ask: of a state dict, whose tensors have memory of values, and of a model, by identity."""
    from accelerate.utils.modeling import find_tied_parameters, id_tensor_storage

    model = converted(Pair(), weights="fp8")
    state = model.state_dict()
    if draw.random() < 0.5:
        return right(not find_tied_parameters(model))
    places = {id_tensor_storage(tensor) for tensor in state.values()}
    return right(len(places) == len(state) and all(len(names) == 1 for names in _find_shared_tensors(state)))


@case_of("messages", "is_pinned of FP8 weights")
def _pinned(draw: Random) -> Outcome:
    return right(converted(Pair(), weights="fp8").q.weight.is_pinned() is False)


@case_of("messages", "an encoder layer of PyTorch in evaluation")
def _encoder(draw: Random) -> Outcome:
    model = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True).eval()
    x = torch.randn(2, 8, 64)
    with torch.no_grad():
        plain = model(x)
        y = converted(model, weights=draw.choice(("unchanged", "fp8")))(x)
    return right(float((y - plain).norm() / plain.norm()) < 0.2)
