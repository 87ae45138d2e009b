from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest
from torch import nn

import octavo
from octavo.errors import ConfigError
from octavo.lab.sensitivity.precision_switch import choices
from octavo.lab.sensitivity.result import _cells, to_toml
from octavo.recipes import Evidence, load

EVIDENCE = Evidence(reason="within the loss budget", loss_change=-1.2e-05, loss_error=3e-06, turned={"fprop": 1e-4},
                    ms_saved=0.01, ms_offered=0.02)  # fmt: skip


def localised(recipe, modules, evidence):
    return replace(recipe, name=f"{recipe.name}, localised", modules=modules, evidence=evidence)


def made(recipe):
    chosen = {f"layers.{i}.up": each for i, each in enumerate(choices(recipe).values())}
    return localised(recipe, chosen, dict.fromkeys(chosen, EVIDENCE))


@pytest.mark.parametrize("recipe", ["tensorwise", "folded", "rowwise_bf16_wgrad", "delayed", "mine"])
def test_what_is_written_is_read_again(recipe, tmp_path):
    mine = {"base": "block", "name": "mine", "history": {"length": 4}, "fprop": {"input": {"granularity": "128x128"}}}
    found = made(load({**mine, "fprop": {"input": {"format": "e5m2"}}} if recipe == "mine" else recipe))
    path = to_toml(found, tmp_path / "new" / "map.toml")
    assert load(path) == found


@pytest.mark.parametrize("error", [None, 0.0], ids=["none", "as written before"])
def test_of_a_single_sequence_no_error_is_known(error, tmp_path):
    recipe = load("folded")
    found = localised(recipe, {"up": recipe}, {"up": replace(EVIDENCE, loss_error=error)})
    path = to_toml(found, tmp_path / "map.toml")
    assert load(path) == found and ("loss_error" in path.read_text()) == (error is not None)
    row = {"layer": "up", "shape": [8, 8], "gemm": "fprop", "loss_change": 1e-3, "loss_error": None, "cosine": 1.0,
           "cost": 0.0, "ms_saved": 0.0, "chosen": True}  # fmt: skip
    assert _cells(row, True)[3:5] == ("+1.0e-03", "")


def test_a_line_a_layer_that_differs_where_the_choice_does(tmp_path):
    recipe = load("tensorwise")
    offered = choices(recipe)
    paths = [
        to_toml(localised(recipe, {"a": offered[()], "b": b}, {"a": EVIDENCE, "b": EVIDENCE}), tmp_path / f"{i}.toml")
        for i, b in enumerate([offered["fprop", "dgrad", "wgrad"], offered["fprop", "wgrad"]])
    ]
    texts = [path.read_text().splitlines() for path in paths]
    assert [pair for pair in zip(*texts, strict=True) if pair[0] != pair[1]] == [
        ('"b" = "tensorwise"', '"b" = { base = "tensorwise", name = "tensorwise fprop+wgrad", '
         'dgrad = { precision = "bf16" } }')
    ]  # fmt: skip
    assert tomllib.loads(paths[0].read_text())["base"] == "tensorwise"


def test_files_that_cannot_be(tmp_path):
    with pytest.raises(ConfigError, match=r"is a \.toml file"):
        to_toml(made(load("folded")), tmp_path / "map.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        to_toml(made(load("folded")), tmp_path / "file" / "map.toml")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x):
        return self.q(x), self.k(x), self.v(x)


def test_layers_that_the_map_treats_alike_are_still_computed_together(tmp_path):
    recipe = load("tensorwise")
    chosen = dict.fromkeys("qkv", choices(recipe)["fprop", "wgrad"])
    path = to_toml(localised(recipe, chosen, {}), tmp_path / "map.toml")
    model = Attention()
    plan = octavo.convert(model, path)
    assert [structure.layers for structure in plan.structures] == [("q", "k", "v")]
    assert model.q.recipe is model.k.recipe is model.v.recipe
