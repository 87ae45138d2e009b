"""Trainers of TRL: supervised fine-tuning, and DPO with its reference model."""

from typing import Any

import pytest

pytest.importorskip("trl", reason="needs trl (octavo[clients])")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import octavo
from octavo.integrations.transformers import OctavoCallback
from octavo.nn import Linear

FP8_LAYERS = 14

WORDS = [f"w{i}" for i in range(90)]
SETTINGS: dict[str, Any] = {
    "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "logging_steps": 1, "save_strategy": "no",
    "report_to": [], "use_cpu": True, "bf16": True, "disable_tqdm": True, "gradient_checkpointing": False,
}  # fmt: skip


@pytest.fixture
def tokenizer() -> Any:
    """Return a tokenizer of whole words: nothing is downloaded."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{word: 3 + i for i, word in enumerate(WORDS)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def text(start: int, step: int = 1) -> str:
    return " ".join(WORDS[(start + step * i) % len(WORDS)] for i in range(16))


def test_supervised_fine_tuning(llama, tokenizer, tmp_path):
    data = Dataset.from_list([{"text": text(i)} for i in range(48)])
    run = SFTTrainer(
        model=llama(), args=SFTConfig(output_dir=str(tmp_path), max_length=32, **SETTINGS), train_dataset=data,
        processing_class=tokenizer, callbacks=[OctavoCallback()],
    )  # fmt: skip
    run.train()
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    assert logged[-1]["loss"] < logged[0]["loss"]
    assert all(entry["fp8_layers"] == FP8_LAYERS and entry["fp8_gemms"] >= 2 * 15 for entry in logged)


def test_dpo_whose_reference_is_converted_too_starts_without_a_margin(llama, tokenizer, tmp_path):
    data = [{"prompt": text(i), "chosen": " " + text(i + 16), "rejected": " " + text(i, 7)} for i in range(24)]
    reference = llama()
    octavo.convert(reference)
    run = DPOTrainer(
        model=llama(), ref_model=reference, args=DPOConfig(output_dir=str(tmp_path), max_length=64, **SETTINGS),
        train_dataset=Dataset.from_list(data), processing_class=tokenizer, callbacks=[OctavoCallback()],
    )  # fmt: skip
    assert sum(isinstance(m, Linear) for m in run.model.modules()) == FP8_LAYERS
    run.train()
    logged = [entry for entry in run.state.log_history if "rewards/margins" in entry]
    assert abs(logged[0]["rewards/margins"]) < 1e-3, "the same model computes the same"
    assert logged[-1]["rewards/margins"] > logged[0]["rewards/margins"] + 1e-3
    assert logged[0]["fp8_layers"] == FP8_LAYERS
