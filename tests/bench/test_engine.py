"""Transformer Engine's blocks compute what ours do, from the same weights; its modules are stood in for here."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo_bench import engine
from octavo_bench.implementations import Implementation, implementations
from octavo_bench.workloads import WORKLOADS, build

modes: list[str] = []
"""The recipe that was on when each linear module ran."""


class Autocast:
    """`te.autocast`: notes its recipe."""

    on = ""

    def __init__(self, *, enabled: bool, recipe: Any) -> None:
        self.recipe = recipe

    def __enter__(self) -> None:
        Autocast.on = type(self.recipe).__name__

    def __exit__(self, *raised: object) -> None:
        Autocast.on = ""


class Linear(nn.Linear):
    """`te.Linear`."""

    def __init__(self, n_in: int, n_out: int, *, bias: bool, params_dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(n_in, n_out, bias=bias, device=device, dtype=params_dtype)

    def forward(self, x: Tensor) -> Tensor:
        modes.append(Autocast.on)
        return super().forward(x)


class LayerNormLinear(Linear):
    """`te.LayerNormLinear`."""

    def __init__(self, n_in: int, n_out: int, *, normalization: str, eps: float, **options: Any) -> None:
        super().__init__(n_in, n_out, **options)
        assert normalization == "RMSNorm"
        self.layer_norm_weight, self.eps = nn.Parameter(torch.zeros(n_in, dtype=self.weight.dtype)), eps

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps))


class LayerNormMLP(LayerNormLinear):
    """`te.LayerNormMLP`: `fc1` has the rows of the gate, which SiLU is applied to, and then those of the other."""

    def __init__(self, dim: int, ffn: int, *, activation: str, **options: Any) -> None:
        super().__init__(dim, 2 * ffn, **options)
        assert activation == "swiglu"
        self.fc1_weight, self.fc2_weight = self.weight, nn.Parameter(torch.zeros(dim, ffn, dtype=self.weight.dtype))
        del self.weight

    def forward(self, x: Tensor) -> Tensor:
        modes.append(Autocast.on)
        normed = F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps)
        gate, up = F.linear(normed, self.fc1_weight).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.fc2_weight)


class TransformerLayer(nn.Module):
    """`te.TransformerLayer` with fused QKV: per group of heads its queries, its key and its value."""

    def __init__(self, dim: int, ffn: int, heads: int, **options: Any) -> None:
        super().__init__()
        kept = ("bias", "params_dtype", "device")
        linear = {name: options[name] for name in kept}
        normed = linear | {"normalization": options["normalization"], "eps": options["layernorm_epsilon"]}
        dropouts = options["hidden_dropout"] + options["attention_dropout"]
        assert dropouts == 0 and options["fuse_qkv_params"] and options["attn_input_format"] == "bshd"
        self.groups, self.per_group, self.size = (
            options["num_gqa_groups"],
            heads // options["num_gqa_groups"],
            dim // heads,
        )
        self.self_attention: Any = nn.Module()
        width = (heads + 2 * self.groups) * self.size
        self.self_attention.layernorm_qkv = LayerNormLinear(dim, width, **normed)
        self.self_attention.proj = Linear(dim, dim, **linear)
        self.layernorm_mlp = LayerNormMLP(dim, ffn, activation=options["activation"], **normed)

    def forward(self, x: Tensor, rotary_pos_emb: Tensor) -> Tensor:
        qkv: Any = self.self_attention.layernorm_qkv(x).unflatten(-1, (self.groups, self.per_group + 2, self.size))
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in qkv.split((self.per_group, 1, 1), dim=3))
        angles = rotary_pos_emb[:, 0, 0]
        q, k = (self._rotate(part, angles) for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.self_attention.proj(y.transpose(1, 2).flatten(2))
        z: Tensor = x + self.layernorm_mlp(x)
        return z

    def _rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return (x.float() * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()).to(x.dtype)


@pytest.fixture
def stood_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the classes above in the place of Transformer Engine."""
    names: dict[str, Any] = {name: type(name, (), {}) for name in engine.RECIPES.values()}
    root, common, pytorch = (ModuleType(f"transformer_engine{part}") for part in ("", ".common", ".pytorch"))
    common.recipe = SimpleNamespace(**names)  # type: ignore[attr-defined]
    for made in (Linear, LayerNormLinear, LayerNormMLP, TransformerLayer):
        setattr(pytorch, made.__name__, made)
    pytorch.autocast = Autocast  # type: ignore[attr-defined]
    root.common, root.pytorch = common, pytorch  # type: ignore[attr-defined]
    for module in (root, common, pytorch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    modes.clear()


@pytest.mark.parametrize("block", [engine.ModuleBlock, engine.LayerBlock])
def test_a_block_computes_what_the_one_it_replaces_did(stood_in: None, block: Any) -> None:
    workload = WORKLOADS["tiny"]
    model = build(workload, Implementation(name="bf16"), "cpu", compile=False).model
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms start at one, and so would not tell if they were exchanged
            nn.init.uniform_(parameter, 0.5, 1.5)
    x = torch.randn(2, 64, workload.dim, dtype=torch.bfloat16, requires_grad=True)
    y, dy = model(x), torch.randn_like(x)
    expected = y, torch.autograd.grad(y, x, dy)[0]
    drawn = torch.get_rng_state()
    engine.convert(model, workload.tokens, recipe="current", block=block)
    assert torch.equal(drawn, torch.get_rng_state())  # every implementation gets the same data
    y = model(x)
    for ours, its in zip(expected, (y, torch.autograd.grad(y, x, dy)[0]), strict=True):
        assert (ours - its).float().norm() < 0.01 * ours.float().norm()
    assert modes == ["Float8CurrentScaling"] * 3 * workload.layers
    assert sum(parameter.numel() for parameter in model.parameters()) == workload.weights + 4 * workload.dim


def test_its_implementations_are_there_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name for name in implementations() if name.startswith("transformer engine")}
    assert not known
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "transformer_engine" else None)
    found = {name: one for name, one in implementations().items() if name.startswith("transformer engine")}
    assert set(found) == {
        f"transformer engine {recipe}{how}" for recipe in engine.RECIPES for how in ("", " (modules)")
    }
    assert not any(one.fullgraph for one in found.values())
    assert [one.compile for one in found.values()] == [False] * 3 + [True] * 3
