"""`octavo export` of a run of a few steps, and its tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from octavo.errors import CheckpointError, UnsupportedError
from octavo.lab.cli.main import main
from octavo.lab.data.tokenizer import ByteTokenizer
from octavo.lab.train.export import export_flags, export_run, tokenizer_files
from octavo.numerics import quantize


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, train_run: Callable[..., Path]) -> Path:
    """Return a directory of runs, each of a few steps; their text is gone."""
    home = tmp_path_factory.mktemp("runs")
    train_run(home, "folded", recipe="folded", weights="bf16", checkpoint_every=1)
    train_run(home, "fp8 weights", weights="fp8")
    train_run(home, "bf16", recipe="bf16")
    train_run(home, "gpt", model={"architecture": "gpt"})
    shutil.rmtree(home / "text")
    return home


def checkpoint(run: Path, step: int = 2) -> dict[str, torch.Tensor]:
    (file,) = (run / "checkpoints" / f"step-{step:06d}").glob(
        "*16.safetensors" if run.name == "bf16" else "fp8.safetensors"
    )
    return load_file(file)


def test_the_codes_are_those_of_the_weights_that_were_saved(runs, tmp_path):
    exported = export_run(runs / "folded", tmp_path / "out")
    assert (exported.format, exported.dtype, len(exported.fp8_layers)) == ("compressed-tensors", "bfloat16", 7)
    written, saved = load_file(tmp_path / "out/model.safetensors"), checkpoint(runs / "folded")
    codes, scale, _ = quantize(saved["model.layers.0.feed_forward.w2.weight"])
    assert torch.equal(written["model.layers.0.mlp.down_proj.weight"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(written["model.layers.0.mlp.down_proj.weight_scale"], scale)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["eos_token_id"] == 256 and config["max_position_embeddings"] == 32
    assert {"tokenizer.json", "tokenizer_config.json"} <= exported.files.keys()


def test_weights_in_fp8_are_the_bytes_of_the_checkpoint(runs, tmp_path):
    export_run(runs / "fp8 weights" / "checkpoints" / "step-000002", tmp_path / "out")
    written, saved = load_file(tmp_path / "out/model.safetensors"), checkpoint(runs / "fp8 weights")
    codes = saved["model.layers.0.attention.wo.weight.codes"].view(torch.uint8)
    assert torch.equal(written["model.layers.0.self_attn.o_proj.weight"].view(torch.uint8), codes)
    scale = saved["model.layers.0.attention.wo.weight.scale"]
    assert torch.equal(written["model.layers.0.self_attn.o_proj.weight_scale"], scale)


def test_a_step_names_the_checkpoint(octavo, runs, tmp_path, capsys):
    run, out = runs / "folded", tmp_path / "out"
    assert octavo(["export", run, "--out", out, "--step", 1]) == 0
    written = load_file(out / "model.safetensors")["lm_head.weight"]
    first, last = (checkpoint(run, step)["model.lm_head.weight"] for step in (1, 2))
    assert torch.equal(written, first) and not torch.equal(written, last)
    assert f"octavo eval {out} --run {run} --step 1" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3\. Checkpoints: step-000001, step-000002"):
        export_run(run, tmp_path / "other", step=3)


def test_a_run_in_bf16_is_plain(runs, tmp_path):
    exported = export_run(runs / "bf16", tmp_path / "out", dtype=torch.float32)
    assert exported.format == "plain" and not exported.fp8_layers
    written = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(written["lm_head.weight"], checkpoint(runs / "bf16")["model.lm_head.weight"].float())


def test_the_flags_of_an_export_are_those_that_it_takes(runs, tmp_path):
    assert [export_flags(runs / name) for name in ("folded", "fp8 weights", "bf16", "gpt")] == ["", "", "", None]
    run = shutil.copytree(runs / "folded", tmp_path / "run")
    shutil.rmtree(run / "checkpoints")  # weights are not read
    planned = json.loads((run / "plan.json").read_text())
    for layer in planned["layers"]:  # as if none had gained on the GPU of the run
        layer["precision"] = "bf16"
    (run / "plan.json").write_text(json.dumps(planned))
    (run / "export").mkdir()
    assert export_flags(run) == " --format plain --overwrite"


def test_what_cannot_be_exported(runs, tmp_path):
    with pytest.raises(UnsupportedError, match="no engine supports a GPT"):
        export_run(runs / "gpt", tmp_path / "out")
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        export_run(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(octavo, runs, tmp_path, capsys):
    out = tmp_path / "out"
    assert octavo(["export", runs / "folded", "--out", out]) == 0
    said = capsys.readouterr().out
    assert "FP8          7 layers: weights by row, inputs by token" in said
    assert f"vllm serve {out}" in said and f"octavo eval {out} --run " in said
    flags = ["--overwrite", "--format", "plain", "--dtype", "float32", "--json"]
    assert octavo(["export", runs / "folded", "--out", out, *flags]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "plain"


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        ([], 2, "exists already"),
        (["--overwrite"], 2, "not an exported model"),
        (["--format", "fp8"], 1, "Use the format 'compressed-tensors'"),
    ],
)
def test_errors_are_one_line(runs, tmp_path, capsys, flags, code, says):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    out = tmp_path / ("new" if "--format" in flags else "mine")
    with pytest.raises(SystemExit) as exit:
        main(["export", str(runs / "folded"), "--out", str(out), *flags])
    error = capsys.readouterr().err
    assert exit.value.code == code and says in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "thesis.txt"]


tokenizers = pytest.importorskip("tokenizers")

TEXT = "def f(x):\n\treturn 'é∑' + x  # \x00\x7f\xad\xa0 ok\r\n"


def loaded(files):
    return tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))


def test_bytes_are_ids():
    files = tokenizer_files(ByteTokenizer(), 64)
    backend = loaded(files)
    assert backend.encode(TEXT).ids == list(TEXT.encode()) == ByteTokenizer().encode(TEXT).tolist()
    assert backend.decode(backend.encode(TEXT).ids) == TEXT
    assert backend.token_to_id(files["tokenizer_config.json"]["eos_token"]) == ByteTokenizer.end_of_document
    everything = bytes(range(128)).decode() + "".join(map(chr, range(0x80, 0x800)))
    assert backend.encode(everything).ids == list(everything.encode())


def test_a_bpe_is_written_as_it_is():
    from octavo.lab.data.bpe import BPETokenizer

    trained = BPETokenizer.train(["the cat sat on the mat " * 50], 272)
    files = tokenizer_files(trained, 64)
    assert loaded(files).encode("the cat sat").ids == trained.encode_batch(["the cat sat"])[0].tolist()
    assert loaded(files).token_to_id(files["tokenizer_config.json"]["eos_token"]) == trained.end_of_document
    assert files["tokenizer_config.json"]["model_max_length"] == 64
