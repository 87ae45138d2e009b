"""The command line as a user meets it: in the process of the test, or in its own where that makes a difference."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo import __version__, recipes
from octavo.errors import ConfigError
from octavo.kernels.runtime.devices import GPUS, H100
from octavo.lab.cli.main import COMMANDS, main

Done = subprocess.CompletedProcess[str]
Octavo = Callable[..., Done]
COMMAND = [sys.executable, "-m", "octavo"]
OWN_MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4096, 16384), torch.nn.Linear(16384, 4096)

def build():
    return Model()

def batches():
    yield (torch.zeros(4096, 4096),)
"""
TEXT = "\n".join(f"{i} apples and {i * i % 89} pears" for i in range(2000))


@functools.cache
def process(*arguments: str, columns: int = 120) -> Done:
    """Run `octavo` in a process of its own, once: its console keeps the width of its first use."""
    env = {**os.environ, "COLUMNS": str(columns)}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, env=env)


@pytest.fixture
def octavo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Octavo:
    """Return a function that runs `octavo` in this process and returns its exit code and output."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert isinstance(ended.value.code, int)
        return subprocess.CompletedProcess(arguments, ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Return the arguments of a run of seconds, in a directory of its own."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    places = {"--source": tmp_path / "text.txt", "--cache": tmp_path / "cache", "--out": tmp_path / "run"}
    flags = [part for flag, path in places.items() for part in (flag, str(path))]
    small = ["--model.layers", "1", "--eval-tokens", "512"]
    return ["train", "--preset", "tiny", *small, "--device", "cpu", "--log-every", "1", *flags]


def test_help_is_quick_and_needs_no_torch() -> None:
    code = """
import sys, octavo.lab.cli.main as m
for line in sys.argv[1:]:
    try: m.main(line.split())
    except SystemExit as e: assert not e.code, line
    assert 'torch' not in sys.modules, line
"""
    done, _ = _timed(code, *(f"{command} --help" for command in ("train", "plan", "doctor", "eval")))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: octavo") == 4
    pairs = []
    while len(pairs) < 3 and not _is_quick(pairs):
        done, seconds = _timed(code, "--help")
        pairs.append((seconds, _timed("import cyclopts, rich.console")[1]))
        assert done.returncode == 0, done.stderr
        assert "Usage: octavo" in done.stdout
    assert _is_quick(pairs), pairs


def _is_quick(pairs: list[tuple[float, float]]) -> bool:
    """Compare with imports that any command needs, timed beside it: a shared machine is not always as slow."""
    return any(seconds < max(0.5, 6 * floor) for seconds, floor in pairs)


def _timed(code: str, *arguments: str) -> tuple[Done, float]:
    """Run Python and return the seconds of a processor: of the clock's, other tests have their share."""
    start = _cpu_seconds()
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    return done, _cpu_seconds() - start


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_version() -> None:
    assert process("--version").stdout.strip() == __version__


def test_help_has_a_flag_for_every_field_in_the_words_of_the_field() -> None:
    text = " ".join(process("train", "--help-all").stdout.replace("│", " ").split())
    assert "--optimizer.weight-decay --weight-decay" in text
    assert "Decoupled weight decay, on matrices only." in text
    assert "--no-baseline" in text
    assert "--optimizer.states --states" in text
    # `sequence` is a field of two sections: it has no short name.
    assert "--data.sequence" in text
    assert " --sequence" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "'train'|\"train\""),
        (["train"], "name a run file, a preset"),
        (["train", "--preset", "dmo"], "Did you mean 'demo'"),
        (["train", "demo"], "demo: no such file or directory. The preset of that name is --preset demo"),
        (["train", "--preset", "tiny", "--stepz", "3"], "--stepz.*Did you mean '--steps'"),
        (["train", "--preset", "tiny", "--layers=3"], "--layers. Did you mean '--model.layers' or '--lora.layers'?"),
        (["train", "--preset", "tiny", "--epochs", "3"], "octavo train: unknown option --epochs.$"),
        (["train", "--preset", "tiny", "--lora.layers", "3"], "lora.layers: has no effect while lora.rank is 0"),
        (["train", "--preset", "tiny", "--recipe", "fp8"], "The default in eight bits is 'rotated'"),
        (["train", "--preset", "tiny", "--steps", "many"], "--steps.*many"),
        (["train", "--preset", "tiny", "--steps", "0"], "run.steps: 0 is not a positive number"),
        (["train", "--preset", "tiny", "--compile", "maybe"], "--compile.*auto"),
        (["train", "--preset", "tiny", "--recipe", "foldd"], "'foldd'.*Did you mean 'folded'"),
        (["train", "--preset", "tiny", "--device", "tpu"], "run.device"),
        (["train", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (["recipes", "foldd"], "Did you mean 'folded'"),
    ],
)
def test_wrong_usage_is_one_line_and_exits_with_2(octavo: Octavo, arguments: list[str], message: str) -> None:
    done = octavo(*arguments)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("octavo: error: ")
    assert re.search(message, line), line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[run]\nstepz = 3\n", "run.toml: run: unknown key 'stepz'. Did you mean 'steps'?"),
        ("[optimiser]\nlr = 1e-3\n", "run.toml: unknown key 'optimiser'. Did you mean 'optimizer'?"),
        ("[run]\nsteps = '3'\n", "run.toml: run: steps: expected int, got '3'"),
        ("[run\n", "run.toml: malformed toml"),
    ],
)
def test_wrong_file_names_the_file_the_key_and_what_was_meant(
    octavo: Octavo, tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(content, encoding="utf-8")
    done = octavo("train", str(file), "--preset", "tiny")
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_flags_win_over_the_file_and_the_file_over_the_preset(octavo: Octavo, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nsteps = 7\nbatch = 2\nbaseline = true\n", encoding="utf-8")
    flags = "--preset tiny --steps 9 --no-baseline --betas 0.8 0.9 --dry-run"
    done = octavo("train", str(file), *flags.split())
    config = json.loads(done.stdout)
    assert (config["run"]["steps"], config["run"]["batch"], config["run"]["log_every"]) == (9, 2, 5)
    assert config["run"]["baseline"] is False
    assert config["optimizer"]["betas"] == [0.8, 0.9]


def test_a_run_from_end_to_end_and_on_from_there(octavo: Octavo, tiny: list[str], tmp_path: Path) -> None:
    done = process(*tiny, "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "held-out loss FP8" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    wanted = "recipe device steps tokens heldout_loss_fp8 heldout_loss_bf16 gap_percent fp8_gemms fallbacks"
    assert set(wanted.split()) <= summary.keys()

    again = octavo(*tiny, "--steps", "3")
    assert again.returncode == 2
    assert "--resume continues it" in again.stderr

    longer = octavo("train", str(tmp_path / "run" / "config.json"), "--resume", "--steps", "5", "--json")
    assert longer.returncode == 0, longer.stderr
    assert json.loads(longer.stdout)["steps"] == 5
    assert "resumed after step 3" in longer.stderr
    once_more = octavo("train", str(tmp_path / "run"), "--resume")
    assert "resumed after step 5 of a complete run: --steps N makes it longer" in once_more.stdout


def test_errors_of_the_data_exit_with_1_and_leave_nothing(octavo: Octavo, tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("", encoding="utf-8")
    done = octavo(*tiny)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("octavo: error: ")
    assert not (tmp_path / "run").exists()


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    with pytest.raises(ConfigError, match="foldd"):  # not an exit: Python prints the traceback
        main(["recipes", "foldd"])


def test_interrupting_says_how_to_continue(octavo: Octavo, tiny: list[str], tmp_path: Path) -> None:
    checkpoints, ended = tmp_path / "run" / "checkpoints", threading.Event()

    def interrupt() -> None:
        while not list(checkpoints.glob("step-*")):
            if ended.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=interrupt)
    presser.start()
    try:
        done = octavo(*tiny, "--steps", "100000", "--checkpoint-every", "5")
    finally:
        ended.set()
        presser.join()
    assert done.returncode == 130
    assert f"octavo train {tmp_path / 'run'} --resume" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(checkpoints.glob(".*"))


@pytest.mark.parametrize(
    ("flags", "flag", "other"),
    [
        ("", "", "folded"),
        pytest.param("--recipe folded", "", "block", marks=pytest.mark.slow),
        ("--recipe block", " --format plain", "folded"),  # blocks span layers of this width
        # no fprop in FP8
        pytest.param("--recipe rowwise_bf16_fprop", " --format plain", "folded", marks=pytest.mark.slow),
        ("--recipe folded --weights fp8", "", None),  # other recipes cannot compute with its codes
        ("--recipe mxfp8 --lora.rank 2", " --format plain", "folded"),
        ("--recipe folded --model.architecture moe --min-gain 9", None, "block"),
    ],
)
def test_the_commands_that_a_run_suggests_work(
    octavo: Octavo, tiny: list[str], tmp_path: Path, flags: str, flag: str | None, other: str | None
) -> None:
    run = tmp_path / "run"
    text = octavo(*tiny, "--no-baseline", "--steps", "2", *flags.split()).stdout.partition("\nNext\n")[2]
    commands = [shlex.split(line[22:])[1:] for line in text.partition("\n\n")[0].splitlines()]
    exports = [" ".join(command) for command in commands if command[0] == "export"]
    assert exports == ([] if flag is None else [f"export {run}{flag}"])
    recipes = [command[command.index("--recipe") + 1] for command in commands if "--recipe" in command]
    assert recipes == ([] if other is None else [other])
    for command in commands:
        if command[0] != "dashboard":  # which ends only when stopped
            done = octavo(*command)
            assert done.returncode == 0, (command, done.stderr)
    again = octavo("train", str(run), "--resume", "--steps", "5").stdout
    assert f"export {run}{flag} --overwrite\n" in again if flag is not None else " export " not in again
    assert f"{run}-{other}\n" not in again  # which is there


def test_plan_shows_every_linear_layer(octavo: Octavo) -> None:
    done = octavo("plan", "--preset", "tiny", "--recipe", "block", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "layers.*.feed_forward.w3 (2)" in done.stdout
    assert "lm_head" in done.stdout
    assert "recipe block" in done.stdout


def test_plan_for_a_gpu_that_is_not_here(octavo: Octavo) -> None:
    done = octavo("plan", "--preset", "parity-cuda", "--recipe", "folded", "--gpu", "h100", "--json")
    layers = json.loads(done.stdout)["layers"]
    assert all(layer["gain"] > 1 for layer in layers if "fp8" in layer["precision"])
    assert json.loads(done.stdout)["device"] == "h100"
    assert done.stderr == "" and not any("autocast" in note for note in json.loads(done.stdout)["notes"])
    assert "h200" in octavo("plan", "--preset", "tiny", "--gpu", "a101").stderr
    assert "no FP8 tensor cores" in octavo("plan", "--preset", "tiny", "--gpu", "a100").stdout
    assert " 2048 x 2048 " in octavo("plan", "--preset", "demo", "--gpu", "h200").stdout  # not the demo of a CPU
    choices = re.search(r"│ --gpu +.*?\[choices: ([^\]]*)\]", octavo("plan", "--help").stdout, re.S)
    assert choices is not None and re.split(r"[\s,|│]+", choices[1].strip(" │\n")) == [*GPUS]


def test_predicted_memory_is_that_of_a_named_gpu(octavo: Octavo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    command = "plan", "--preset", "tiny", "--model.layers", "1", "--no-baseline", "--memory", "--compile=off"
    assumed = octavo(*command).stdout
    assert "parameters in memory on h200\n" in assumed and assumed.endswith(
        "\nno GPU here: predicted for `--gpu h200`\n"
    )
    named = octavo(*command, "--gpu", "h100").stdout
    assert "parameters in memory on h100\n" in named and "no GPU here" not in named
    assert json.loads(octavo(*command, "--json").stdout)["device"] == "h200"
    refused = octavo(*command, "--gpu", "a100")
    assert refused.returncode == 2 and "memory is predicted for h100, h200" in refused.stderr


def test_the_gpu_decides_which_layers_memory_is_predicted_for(octavo: Octavo, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = H100._replace(copy=1e9, row=1e9)  # quantising is free: small layers gain too
    command = ("plan", "--preset", "tiny", "--dim", "512", "--model.layers", "1", "--batch", "64", "--no-baseline")
    command += ("--memory", "--json", "--compile", "off")
    before = json.loads(octavo(*command, "--gpu", "h100").stdout)
    monkeypatch.setitem(GPUS, "h100", GPUS["h100"]._replace(rates=fast))
    assert json.loads(octavo(*command, "--gpu", "h100").stdout)["activations_gib"] != before["activations_gib"]


def test_plan_of_a_model_of_ones_own(octavo: Octavo, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_MODEL, encoding="utf-8")
    done = octavo("plan", str(tmp_path / "own.py"), "--gpu", "h100")
    assert done.returncode == 0 and "up     16384 x 4096  rotated" in done.stdout, done.stderr
    assert "with 4,096 tokens per forward" in done.stdout
    assert "--optimizer.lr: is for run files" in octavo("plan", str(tmp_path / "own.py"), "--lr", "1").stderr
    assert "is for run files" not in octavo("plan", str(tmp_path / "own.py"), "--recipe", "block").stderr


def test_plan_of_a_model_whose_code_reads_values_of_tensors(octavo: Octavo, tmp_path: Path) -> None:
    """As of a drop path that grows with the depth: there are no values on the meta device."""
    reads = OWN_MODEL.replace("super().__init__()", "super().__init__(); self.rate = torch.linspace(0, 1, 3)[1].item()")
    (tmp_path / "own.py").write_text(reads.replace("4096", "64").replace("16384", "256"), encoding="utf-8")
    done = octavo("plan", str(tmp_path / "own.py"), "--gpu", "h100")
    assert done.returncode == 0 and "256 x 64" in done.stdout, done.stderr


def test_plan_of_a_hugging_face_config(octavo: Octavo, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "vocab_size": 512}
    transformers.LlamaConfig(**sizes, num_attention_heads=8).save_pretrained(tmp_path)
    done = octavo("plan", str(tmp_path), "--gpu", "h100", "--batch", "8", "--data.sequence", "2048")
    assert "model.layers.*.mlp.up_proj (2)" in done.stdout and "with 16,384 tokens per forward" in done.stdout
    for command in ("train", str(tmp_path)), ("plan", str(tmp_path), "--memory"):
        assert octavo(*command).returncode == 2
    assert "is a Hugging Face config, not a run file" in octavo("train", str(tmp_path)).stderr


def test_reasons_of_a_plan_have_lines_of_their_own_in_a_narrow_terminal(
    octavo: Octavo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = {}
    for width in (80, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        coloured = octavo("plan", "--preset", "tiny", "--device", "cpu").stdout
        shown[width] = re.sub(r"\x1b\[[0-9;]*m", "", coloured).partition("\n\n")[0].splitlines()
    head = next(line for line in shown[160] if line.startswith("lm_head"))
    assert "output head: " in head and f"    {head[head.index('output head') :]}" in shown[80]
    assert max(map(len, shown[80])) <= 80


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("export", "RUN is missing. `octavo export --help` explains it.\n"),
        ("dump run", "--to is missing. `octavo dump --help` explains it.\n"),
        ("bench phases --steps", "--steps requires an argument"),
        ("plan run.toml x y", "octavo plan: unexpected arguments: 'x', 'y'.\n"),
        ("exprt", "there is no command 'exprt'. Did you mean 'export'? Commands: plan, train, "),
        ("bench stp", 'Did you mean "step"?'),
        ("plan", "no run given: name a run file, a preset with --preset (demo, "),
        ("doctor --only vresions", "Did you mean 'versions'? Checks: versions, packages, "),
        ("report nowhere", "no run found. Name the directory of a run"),
    ],
)
def test_a_wrong_command_line_is_told_what_to_do(octavo: Octavo, line: str, message: str) -> None:
    done = octavo(*line.split())
    assert done.returncode in (1, 2) and done.stdout == ""
    assert done.stderr.startswith("octavo: error: ") and message in done.stderr


def test_help_lists_commands_in_the_order_of_their_use() -> None:
    found = re.findall(r"^│ ([a-z]+) ", process("--help").stdout, re.M)
    assert found == [*COMMANDS, "bench"]


def test_help_is_short_and_shows_defaults_and_help_all_lists_every_setting() -> None:
    short, everything = (process("train", flag).stdout for flag in ("--help", "--help-all"))
    assert len(short.splitlines()) < 100 < len(everything.splitlines())
    assert "--run.steps" in short and "[default: 300]" in short and "--guard." not in short
    assert "--guard." in everything and "[default: False]" not in everything


def test_plan_as_json(octavo: Octavo) -> None:
    done = octavo("plan", "--preset", "tiny", "--json", "--device", "cpu")
    assert len(json.loads(done.stdout)["layers"]) == 2 * 7 + 1


def test_recipes(octavo: Octavo) -> None:
    listed = octavo("recipes").stdout.splitlines()
    shown = [line.split()[0] for line in listed[:-4]]
    assert shown[0] == recipes.DEFAULT and {*shown} == {*recipes.names()} and max(map(len, listed)) <= 132
    assert listed[-3].startswith(f"Default: {recipes.DEFAULT}; {recipes.FALLBACK} where it does not run")
    assert "folded into grad_output" in octavo("recipes", "folded").stdout
    assert "folded" in json.loads(octavo("recipes", "--json").stdout)
    assert json.loads(octavo("recipes", "block", "--json").stdout)["name"] == "block"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["plan", "meta-llama/Llama-3-8B"],
            r"Llama-3-8B: no such file.*`hf download meta-llama/Llama-3-8B config\.json",
        ),
        (["train", "meta-llama/Llama-3-8B"], "no such file .* Hugging Face's hub"),
        (["train", "--from", "nosuch"], "nosuch: no such directory"),
        (["train", "--from", "meta-llama/Llama-3-8B"], "no such directory.*`hf download"),
        (["plan", "gone.json"], r"gone\.json: cannot be read \(No such file or directory\)\.$"),
        (["plan", "runs"], "runs: holds runs, and is none. Name one, such as runs/mine"),
        (["train", "runs"], "runs: holds runs"),
        (["plan", "empty"], "empty: contains no config.json"),
        (["train", "--preset", "tiny", "--dry-run", "--recipe", "foldd"], "foldd.*folded"),
        (["train", "--preset", "tiny", "--dry-run", "--last-recipe", "foldd"], "run.last_recipe.*foldd"),
        (["train", "--preset", "tiny", "--dry-run", "--source", "gone"], "gone: there is no such file or folder"),
        (
            ["train", "--preset", "tiny", "--dry-run", "--source", "plain"],
            "plain: a file without an extension is not read",
        ),
        (["dump", "runs/mine", "--format", "xlsx"], "xlsx.*parquet.*csv.*tensorboard"),
        (
            ["train", "--preset", "tiny", "--level", "1", "--optimizer.loss_scale", "dynamic"],
            "gradients is set by run.level = 1",
        ),
        (["train", "--preset", "tiny", "--model.layers", "1000000"], "model.layers: 1000000 is more than 10000"),
    ],
)
def test_what_was_meant_is_said_before_anything_is_read(
    octavo: Octavo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "plain").write_text("text")
    done = octavo(*arguments)
    assert done.returncode in (1, 2) and re.search(said, done.stderr.strip()), done.stderr
    assert done.stderr.count("\n") == 1


def test_a_model_that_does_not_fit_in_memory_is_said_in_words(octavo: Octavo, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    places = ["--source", str(tmp_path), "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "run")]
    done = octavo("train", "--preset", "tiny", *places, "--no-baseline", "--dim", str(2**40), "--heads", "2")
    assert done.returncode == 2 and "do not fit in memory" in done.stderr, done.stderr


def test_help_breaks_paragraphs_where_the_terminal_ends() -> None:
    lines = process("plan", "--help", columns=80).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    first = next(number for number, line in enumerate(lines) if "FILE  Run file" in line)
    assert lines[first + 1].startswith(
        "│       your own: a Hugging Face config.json or its directory"
    )  # as if one line


@pytest.mark.parametrize("command", ["doctor {} --recipe foldd", "pilot {} --recipes foldd", "plan {} --recipe foldd"])
def test_a_recipe_is_checked_before_a_model_is_read(octavo: Octavo, tmp_path: Path, command: str) -> None:
    own = tmp_path / "mine.py"
    own.write_text("raise SystemExit('read')", encoding="utf-8")
    done = octavo(*command.format(own).split())
    assert done.returncode == 2 and "unknown recipe 'foldd'. Did you mean 'folded'" in done.stderr


def test_a_run_that_began_by_an_earlier_default_goes_on_by_it(octavo: Octavo, tiny: list[str], tmp_path: Path) -> None:
    few = (*tiny, "--no-baseline", "--checkpoint-every", "1")
    assert octavo(*few, "--steps", "2", "--recipe", "folded").returncode == 0  # as without a name, before `rotated`
    again = octavo(*few, "--steps", "3", "--resume")
    assert again.returncode == 0, again.stderr
    assert "recipe folded, on" in again.stdout and "resumed after step 2" in again.stdout
    assert "run.recipe is 'folded' there" in octavo(*few, "--steps", "4", "--recipe", "rotated", "--resume").stderr


def test_a_run_says_below_its_recipe_why_it_is_not_the_default(octavo: Octavo, tiny: list[str]) -> None:
    lines = octavo(*tiny, "--no-baseline", "--steps", "1", "--weights", "fp8").stdout.splitlines()
    second = lines[1 + next(at for at, line in enumerate(lines) if "recipe folded" in line)]
    assert second == "recipe 'folded' in place of the default, 'rotated': weights stored in FP8 have no INT8 codes"
    planned = octavo("plan", "--preset", "tiny", "--weights", "fp8", "--device", "cpu").stdout
    assert planned.startswith(f"{second}\n\nlayer ")
