"""NeMo Automodel's own Llama, converted: recognised and fused as Hugging Face's is, and learning as in BF16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo import convert, kernels

try:
    from nemo_automodel import NeMoAutoModelForCausalLM
except (ImportError, ValueError) as error:  # ValueError: a kernel of its own that a newer Triton refuses
    pytest.skip(f"needs nemo-automodel (octavo[nemo]): {error}", allow_module_level=True)

STEPS = 6


@pytest.fixture
def automodel(llama: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes NeMo's model of the tiny Llama's config and weights."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))  # where NeMo puts the model
    theirs = llama()

    def make() -> Any:
        theirs.config.architectures = ["LlamaForCausalLM"]
        model = NeMoAutoModelForCausalLM.from_config(theirs.config, torch_dtype=torch.float32)
        model.load_state_dict(theirs.state_dict())
        return model

    return make


def train(model: Any, data: Any) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0), []
    for step in range(STEPS):
        batch = torch.utils.data.default_collate([data[8 * step + i] for i in range(8)])
        logits = model(input_ids=batch["input_ids"]).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_its_llama_learns_in_fp8(automodel: Any, sequences: Any) -> None:
    model = automodel()
    assert type(model).__module__.startswith("nemo_automodel.")
    plan = convert(model)
    assert plan.fp8_layers == 14 and "gate_proj + up_proj + silu + down_proj" in str(plan)
    with kernels.record() as ledger:
        losses = train(model, sequences)
    assert sum(ledger.gemms.values()) >= STEPS * 2 * 15 and losses[-1] < losses[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(train(automodel(), sequences)), rtol=1e-2, atol=0)
