"""A run evaluated: against plain PyTorch on the same sequences, the reverted model, and what the run said itself."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import octavo
from octavo.errors import CheckpointError, ConfigError, DataError
from octavo.lab.data import ByteTokenizer
from octavo.lab.evaluation.result import measure
from octavo.lab.evaluation.run import EvalSettings, LoadedRun, evaluate_run
from octavo.lab.evaluation.text import SequenceLayout, whole_text
from octavo.lab.train.evaluate import heldout_losses
from octavo.lab.train.opening import open_run

FEW = EvalSettings(tokens=1024, device="cpu")


def plain_llama(weights: dict[str, Tensor], tokens_BT: Tensor, heads: int = 2) -> Tensor:
    """Return the logits of a Llama of one block, written down once more, in float64."""
    w = {name.removeprefix("model."): x.double() for name, x in weights.items() if name.startswith("model.")}

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"layers.0.{name}.weight"].T

    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = torch.outer(torch.arange(x.shape[-2]), 10000.0 ** -(torch.arange(half) / half)).double()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    x = w["tok_embeddings.weight"][tokens_BT]
    h = norm(x, "layers.0.attention_norm")
    q, k, v = (linear(h, f"attention.w{n}").unflatten(-1, (heads, -1)).transpose(1, 2) for n in "qkv")
    scores = turned(q) @ turned(k).mT / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    x = x + linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), "attention.wo")
    h = norm(x, "layers.0.ffn_norm")
    x = x + linear(F.silu(linear(h, "feed_forward.w1")) * linear(h, "feed_forward.w3"), "feed_forward.w2")
    return norm(x, "norm") @ w["lm_head.weight"].T


def test_the_loss_is_that_of_plain_pytorch(runs):
    loaded = LoadedRun(runs / "folded", FEW)
    text, _ = loaded.text()
    found = {one.computed: one for one in loaded.measure(text, lambda computed, text: text)}
    inputs, targets = (torch.cat(part) for part in zip(*text, strict=True))
    for computed, file in (("high precision", "fp8"), ("BF16 baseline", "bf16")):
        logits = plain_llama(load_file(runs / f"folded/checkpoints/step-000030/{file}.safetensors"), inputs)
        losses = F.cross_entropy(logits.mT, targets, reduction="none").mean(1)
        assert losses.mean() < 4  # it has learned something
        torch.testing.assert_close(found[computed].losses_S, losses, rtol=5e-3, atol=0)  # BF16 against float64
        hits = (logits.argmax(-1) == targets).double().mean()
        assert abs(found[computed].accuracy - float(hits)) < 0.01
    assert not torch.equal(found["FP8"].losses_S, found["high precision"].losses_S)
    assert found["FP8"].fp8_gemms and not found["high precision"].fp8_gemms


def test_high_precision_is_the_reverted_model(runs):
    loaded = LoadedRun(runs / "folded", FEW)
    text, _ = loaded.text()
    _, high, *_ = loaded.measure(text, lambda computed, text: text)
    lane, *_ = open_run(runs / "folded", device="cpu").states()
    assert octavo.revert(lane.model) > 0
    assert torch.equal(heldout_losses(lane, text), high.losses_S)


def test_it_says_what_the_run_said_at_its_end(runs):
    summary = json.loads((runs / "folded/summary.json").read_text())
    found = evaluate_run(runs / "folded", EvalSettings(tokens=2048, device="cpu"))
    assert [score.computed for score in found.scores] == ["FP8", "high precision", "BF16 baseline", "BF16 quantised"]
    fp8, _, baseline, _ = found.scores
    assert fp8.loss == pytest.approx(summary["heldout_loss_fp8"], rel=1e-7)
    assert baseline.loss == pytest.approx(summary["heldout_loss_bf16"], rel=1e-7)
    assert fp8.perplexity == pytest.approx(summary["perplexity_fp8"], rel=1e-6)
    gap = found.differences[1]
    assert gap.loss == pytest.approx(summary["heldout_loss_fp8"] - summary["heldout_loss_bf16"], abs=1e-7)
    assert found.model["step"] == 30 and found.text["heldout"] and not found.notes


@pytest.mark.parametrize("run", ["folded", "fp8_weights"])
def test_the_baseline_quantised_is_a_converted_copy_of_it(runs, run):
    loaded = LoadedRun(runs / run, FEW)
    text, _ = loaded.text()
    *_, quantised = loaded.measure(text, lambda computed, text: text)
    assert quantised.computed == "BF16 quantised" and quantised.fp8_gemms
    _, baseline = open_run(runs / run, device="cpu", baseline=True).states()
    octavo.convert(baseline.model, "folded", policy=octavo.Policy(min_gain=0))
    # With FP8 weights the others are BF16, as those of the served model are.
    exactly = {"rtol": 0.0, "atol": 0.0} if run == "folded" else {"rtol": 1e-4, "atol": 0.0}
    torch.testing.assert_close(heldout_losses(baseline, text), quantised.losses_S, **exactly)


def test_with_a_forward_pass_in_bf16_nothing_is_quantised(runs):
    found = evaluate_run(runs / "bf16_fprop", FEW)
    assert [score.computed for score in found.scores] == ["FP8", "high precision", "BF16 baseline"]


def test_an_integer_forward_pass_is_compared_with_one_in_fp8(runs):
    loaded = LoadedRun(runs / "rotated", FEW)
    text, _ = loaded.text()
    found = loaded.measure(text, lambda computed, text: text)
    assert [score.computed for score in found] == ["INT8", "FP8", "high precision"]
    assert found[0].fp8_gemms.keys() == {"int8"} and found[1].fp8_gemms and "int8" not in found[1].fp8_gemms
    lane, *_ = open_run(runs / "rotated", device="cpu").states()
    octavo.convert(lane.model, "folded", policy=octavo.Policy(min_gain=0))
    # Where a norm computes the codes of `folded` it does so from values in FP32.
    torch.testing.assert_close(heldout_losses(lane, text), found[1].losses_S, rtol=1e-4, atol=0.0)
    assert not torch.equal(found[0].losses_S, found[1].losses_S)


def test_an_earlier_checkpoint(runs):
    earlier = evaluate_run(runs / "folded", EvalSettings(tokens=1024, step=20, device="cpu"))
    named = evaluate_run(runs / "folded/checkpoints/step-000020", FEW)
    assert earlier.model["step"] == named.model["step"] == 20
    assert earlier.scores == named.scores
    assert earlier.scores[0].loss > evaluate_run(runs / "folded", FEW).scores[0].loss
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7. Checkpoints: step-000020, step-000030"):
        evaluate_run(runs / "folded", EvalSettings(step=7))


def test_a_run_in_bf16_has_one_row(runs):
    found = evaluate_run(runs / "bf16", FEW)
    assert [score.computed for score in found.scores] == ["BF16"] and not found.differences


def test_any_other_text(runs, tmp_path):
    (tmp_path / "notes.txt").write_text("the quick brown fox number 77 jumps over the lazy dog.\n" * 9)
    source = str(tmp_path / "notes.txt")
    found = evaluate_run(runs / "folded", EvalSettings(data=source, sequence=16, device="cpu"))
    assert found.text == {
        "source": source, "heldout": False, "tokens": 480, "bytes": 480, "sequences": 30, "sequence": 16
    }  # fmt: skip
    loaded = LoadedRun(runs / "folded", FEW)
    lane, *_ = loaded.subject.states()
    rows = 8  # as many tokens as 4 sequences of 32
    alone = heldout_losses(lane, whole_text(source, ByteTokenizer(), SequenceLayout(sequence=16, rows=rows)))
    assert found.scores[0].loss == pytest.approx(float(alone.mean()), rel=1e-9)


def test_a_text_that_has_changed_is_told(runs, tmp_path):
    shutil.copytree(runs / "folded", tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    summary["corpus"]["content_sha256"] = "of another text"
    (tmp_path / "run/summary.json").write_text(json.dumps(summary))
    (note,) = evaluate_run(tmp_path / "run", FEW).notes
    assert "has changed since training" in note


def test_refusals(runs, tmp_path):
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        evaluate_run(tmp_path, FEW)
    with pytest.raises(ConfigError, match=r"--sequence 64: the model's maximum is 32"):
        evaluate_run(runs / "folded", EvalSettings(sequence=64))
    with pytest.raises(DataError, match="no such file"):
        evaluate_run(runs / "folded", EvalSettings(data=str(tmp_path / "nothing.txt")))
    with pytest.raises(ConfigError, match="none of auto, cpu"):
        evaluate_run(runs / "folded", EvalSettings(device="tpu"))


def test_what_watches_sees_every_batch(runs):
    seen = []

    text, _ = LoadedRun(runs / "bf16", FEW).text()
    measure("anything", lambda batches: torch.zeros(len(list(batches)), 2), text, lambda *told: seen.append(told))
    assert seen == [(f"anything, batch {n + 1} of 8", n / 8) for n in range(8)]
