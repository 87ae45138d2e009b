"""Layers that are built by themselves, without a recipe."""

import torch

import octavo
from octavo.nn.conv import Conv2d
from octavo.nn.default_recipe import recipe_of_layer
from octavo.nn.grouped import GroupedLinear


def test_a_layer_rotates_where_its_features_and_its_device_allow():
    assert octavo.nn.Linear(64, 32).recipe.name == "rotated"
    assert octavo.nn.Linear(72, 32).recipe.name == "folded"  # blocks of 4: outliers stay where they are
    assert octavo.nn.Linear(64, 32, recipe="block").recipe.name == "block"
    assert GroupedLinear(2, 32, 32).recipe.name == Conv2d(32, 32, 1).recipe.name == "folded"


def test_a_device_without_the_int8_gemm_gets_folded(monkeypatch):
    monkeypatch.setattr("octavo.nn.default_recipe.unsupported_reason_device", lambda device: "none here")
    assert recipe_of_layer(None, 64, torch.device("cuda")).name == "folded"
    assert recipe_of_layer("rotated", 64, torch.device("cuda")).name == "rotated"
