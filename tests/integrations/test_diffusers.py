"""A diffusion transformer of diffusers, and its moving average of weights."""

from typing import Any

import pytest
import torch

pytest.importorskip("diffusers", reason="needs diffusers (octavo[clients])")

from diffusers import DiTTransformer2DModel
from diffusers.training_utils import EMAModel

import octavo
from octavo.nn import Linear


def dit() -> Any:
    torch.manual_seed(0)
    return DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=16, norm_num_groups=4,
    )  # fmt: skip


def inputs() -> dict[str, Any]:
    torch.manual_seed(1)
    images, steps, labels = torch.randn(4, 4, 8, 8), torch.randint(16, (4,)), torch.randint(16, (4,))
    return {"hidden_states": images, "timestep": steps, "class_labels": labels}


def train(model: Any, steps: int = 40, ema: Any = None) -> list[float]:
    optimizer, losses, batch = torch.optim.AdamW(model.parameters(), lr=3e-3), [], inputs()
    target = batch["hidden_states"].flip(0)
    for _ in range(steps):
        torch.manual_seed(2)  # dropout of labels
        with torch.autocast("cpu", torch.bfloat16):
            noise = model(**batch).sample[:, :4]
        loss = (noise.float() - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if ema is not None:
            ema.step(model.parameters())
    return losses


def test_a_dit_trains_with_the_loss_of_bf16():
    model = dit()
    plan = octavo.convert(model)
    assert plan.share > 0.7 and sum(isinstance(m, Linear) for m in model.modules()) == plan.fp8_layers
    expected, got = train(dit()), train(model)
    assert expected[-1] < 0.7 * expected[0] and abs(got[-1] - expected[-1]) < 0.01 * expected[0]


def test_averaged_weights_are_those_that_the_layers_compute_with():
    model, twin = dit(), dit()
    octavo.convert(model)
    ema = EMAModel(model.parameters(), decay=0.5)
    train(model, 4, ema)
    before = {name: p.clone() for name, p in model.named_parameters()}
    ema.store(model.parameters())
    ema.copy_to(model.parameters())
    twin.load_state_dict(model.state_dict())
    octavo.convert(twin)
    model.eval(), twin.eval()
    with torch.no_grad():
        averaged = model(**inputs()).sample
        assert torch.equal(averaged, twin(**inputs()).sample)
        ema.restore(model.parameters())
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        assert not torch.equal(model(**inputs()).sample, averaged)
