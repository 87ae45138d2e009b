"""A tiny Llama of transformers and its data, for clients that train one."""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))  # `ranks`

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def llama() -> Any:
    """Return a function that makes the same model each time."""
    transformers = pytest.importorskip("transformers", reason="needs transformers (octavo[clients])")

    def make() -> nn.Module:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))

    return make


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences that a model can learn: each counts up from its first token."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (torch.arange(24) * (1 + index % 3) + index * 5) % 93 + 3
        return {"input_ids": ids, "labels": ids.clone()}


@pytest.fixture
def sequences() -> Sequences:
    return Sequences()


CLIENTS = (
    *("accelerate", "colossalai", "deepspeed", "diffusers", "lightning", "megatron-core", "nemo-automodel", "peft"),
    *("torchtitan", "transformers", "trl"),
)
EXTRAS = ("clients", "deepspeed", "megatron", "nemo", "titan")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name each client with its version, the pinned one, and what came of its tests."""
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pins = dict(line.split("==") for name in EXTRAS for line in extras[name])
    pins["colossalai"] = "0.5.0"  # of no extra: it asks for an old PyTorch
    terminalreporter.section("clients")
    for client in CLIENTS:
        try:
            version = importlib.metadata.version(client)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        counts = {
            outcome: sum(
                f"test_{client.partition('-')[0]}.py" in report.nodeid
                for report in terminalreporter.getreports(outcome)
            )
            for outcome in ("passed", "failed", "error", "skipped")
        }
        came = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) or "no tests ran"
        terminalreporter.write_line(f"{client} {version} (pinned {pins[client]}): {came}")
