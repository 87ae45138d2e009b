"""Another default dtype, as under Lightning's `bf16-true`: no tensor of ours takes its dtype from it."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import octavo
from octavo import recipes

SOURCE = Path(__file__).parents[1] / "src" / "octavo"
FACTORIES = {"empty", "zeros", "ones", "full", "rand", "randn", "eye", "linspace", "logspace"}
LIBRARY = ("calibration", "conversion", "guard", "integrations", "kernels", "monitor", "nn", "numerics", "optim")
"""Folders whose code runs within a user's program."""


@pytest.mark.parametrize("folder", LIBRARY)
def test_every_new_tensor_names_its_dtype(folder):
    found = []
    for path in sorted((SOURCE / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            made = ast.unparse(node.func.value) == "torch" and node.func.attr in FACTORIES
            if made and not any(k.arg in ("dtype", None) for k in node.keywords):
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno}: torch.{node.func.attr} without a dtype")
    assert found == []


def trained(recipe: str, default: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 64)).to(torch.bfloat16)
    optimizer = octavo.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(48, 64).bfloat16()
    torch.set_default_dtype(default)
    try:
        octavo.convert(model, recipe)
        for _ in range(2):
            y = model(x)
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [y.detach(), *(p.detach() for p in model.parameters())]
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("recipe", [name for name in recipes.names() if name not in ("static", "bf16")])
def test_training_gives_the_same_bits_under_every_default_dtype(recipe):
    expected = trained(recipe, torch.float32)
    for default in (torch.bfloat16, torch.float64):
        assert all(torch.equal(a, b) for a, b in zip(trained(recipe, default), expected, strict=True))
