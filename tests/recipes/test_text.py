"""Recipes are read strictly, from every source alike, and explained in words."""

import json
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.recipes import ALIASES, Recipe, brief, explain, kept_for_backward, load, names

EXPLAINED = {
    "folded": """\
recipe folded
  fprop  FP8, slow accumulation
    input       E4M3 row                quantised
    weight      E4M3 row                quantised
  dgrad  FP8, slow accumulation
    grad_output E4M3 row                quantised, after weight's scales are multiplied in
    weight      E4M3 column             codes of fprop, transposed; its scales are folded into grad_output
  wgrad  FP8, slow accumulation
    grad_output E4M3 row                quantised, after input's scales are multiplied in
    input       E4M3 column             codes of fprop, transposed; its scales are folded into grad_output
  kept for backward: input codes of fprop, weight codes of fprop""",
    "rowwise": """\
recipe rowwise
  fprop  FP8, slow accumulation
    input       E4M3 row                quantised
    weight      E4M3 row                quantised
  dgrad  FP8, slow accumulation
    grad_output E4M3 row                quantised
    weight      E4M3 row                quantised
  wgrad  FP8, slow accumulation
    grad_output E4M3 row                quantised
    input       E4M3 row                quantised
  kept for backward: input codes of wgrad, the weight itself""",
    "tensorwise": """\
recipe tensorwise
  fprop  FP8, slow accumulation
    input       E4M3 tensor FP32 scales quantised
    weight      E4M3 tensor FP32 scales quantised
  dgrad  FP8, slow accumulation
    grad_output E5M2 tensor FP32 scales quantised
    weight      E4M3 tensor FP32 scales codes and scales of fprop, transposed
  wgrad  FP8, slow accumulation
    grad_output E5M2 tensor FP32 scales codes and scales of dgrad, transposed
    input       E4M3 tensor FP32 scales codes and scales of fprop, transposed
  kept for backward: input codes of fprop, weight codes of fprop""",
    "block": """\
recipe block
  fprop  FP8, slow accumulation
    input       E4M3 1x128              quantised
    weight      E4M3 128x128            quantised
  dgrad  FP8, slow accumulation
    grad_output E4M3 1x128              quantised
    weight      E4M3 128x128            codes and scales of fprop, transposed
  wgrad  FP8, slow accumulation
    grad_output E4M3 1x128              quantised
    input       E4M3 1x128              quantised
  kept for backward: input codes of wgrad, weight codes of fprop""",
    "bf16": """\
recipe bf16
  fprop  BF16
  dgrad  BF16
  wgrad  BF16
  kept for backward: input in BF16, the weight itself""",
}
EXPLAINED["delayed"] = """\
recipe delayed
  fprop  FP8, slow accumulation
    input       E4M3 tensor FP32 scales delayed  quantised with the scale of earlier steps
    weight      E4M3 tensor FP32 scales          quantised
  dgrad  FP8, slow accumulation
    grad_output E5M2 tensor FP32 scales delayed  quantised with the scale of earlier steps
    weight      E4M3 tensor FP32 scales          codes and scales of fprop, transposed
  wgrad  FP8, slow accumulation
    grad_output E5M2 tensor FP32 scales delayed  codes and scales of dgrad, transposed
    input       E4M3 tensor FP32 scales delayed  codes and scales of fprop, transposed
  kept for backward: input codes of fprop, weight codes of fprop
  kept from step to step: a scale and its maxima; scales are made of the largest value of the last 16 steps"""
CHANGES = {
    "base": "block",
    "history": {"length": 4, "choose": "last"},
    "dgrad": {"grad_output": {"scaling": "float32"}},
    "wgrad": {"precision": "bf16"},
    "modules": {"layers.0.*": "bf16", "*.down": {"base": "folded", "name": "down"}},
}
TOML = """
base = "block"
[history]
length = 4
choose = "last"
[dgrad]
grad_output.scaling = "float32"
[wgrad]
precision = "bf16"
[modules]
"layers.0.*" = "bf16"
[modules."*.down"]
base = "folded"
name = "down"
"""


@pytest.mark.parametrize("name", EXPLAINED)
def test_explain_preset(name):
    assert explain(load(name)) == EXPLAINED[name]


def test_explain_names_the_overrides_and_what_they_change():
    text = explain(load(CHANGES))
    assert "dgrad  FP8, slow accumulation\n    grad_output E4M3 1x128 FP32 scales  quantised" in text
    assert "  wgrad  BF16\n" in text
    assert "kept for backward: input in BF16, weight codes of fprop\n" in text
    assert text.endswith("  layers.0.*: bf16\n  *.down: down")
    assert "fprop  FP8, fast accumulation" in explain(load({"fprop": {"accumulate": "fast"}}))
    assert explain(load("rotated")).startswith("recipe rotated\n  fprop  INT8, exact sums\n    input       INT8 row")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"history": {"length": 4, "margin": 1}}, "made of the largest value of the last 4 steps, times 2^1"),
        ({"history": {"choose": "last"}}, "made of the largest value of the last step"),
        ({"base": "static"}, "nothing; maxima are noted beside the scales of the calibration file"),
        ({"base": "just_in_time"}, "earlier steps, or its own where that would saturate"),
    ],
)
def test_explain_says_where_scales_come_from(changes, expected):
    assert expected in explain(load({"base": "delayed", **changes}))


def test_a_recipe_is_itself():
    recipe = load("block")
    assert load(recipe) is recipe


def test_overrides_change_what_they_name_and_nothing_else():
    block, changed = load("block"), load(CHANGES)
    assert changed.fprop == block.fprop
    assert changed.dgrad.grad_output.scaling == "float32"
    assert changed.dgrad.grad_output.granularity == "1x128"
    assert changed.dgrad.weight == block.dgrad.weight
    assert not changed.wgrad.is_fp8
    assert changed.wgrad.input == block.wgrad.input
    assert block == load("block"), "the preset itself is as it was"


def test_overrides_per_module_are_recipes():
    modules = load(CHANGES).modules
    assert list(modules) == ["layers.0.*", "*.down"]
    assert modules["layers.0.*"] == load("bf16")
    assert modules["*.down"].name == "down"
    assert modules["*.down"].dgrad == load("folded").dgrad


def test_base_is_folded_by_default_and_the_name_says_it_was_changed():
    recipe = load({"wgrad": {"precision": "bf16"}})
    assert recipe.fprop == load("folded").fprop
    assert recipe.name == "folded, changed"
    assert load({"name": "mine"}).name == "mine"


@pytest.mark.parametrize(("suffix", "text"), [(".toml", TOML), (".json", json.dumps(CHANGES))])
def test_a_file_says_the_same_as_a_mapping(tmp_path, suffix, text):
    path = tmp_path / f"mine{suffix}"
    path.write_text(text)
    expected = load({"name": "mine", **CHANGES})
    assert load(path) == load(str(path)) == expected
    assert expected.name == "mine"


def test_a_base_may_be_changed_further():
    base = {"base": "block", "modules": {"a": "bf16"}}
    recipe = load({"base": base, "modules": {"b": "rowwise"}})
    assert recipe.fprop == load("block").fprop
    assert {pattern: other.name for pattern, other in recipe.modules.items()} == {"a": "bf16", "b": "rowwise"}


def test_a_pattern_given_again_matches_last():
    base = {"base": "block", "modules": {"layers.0.*": "bf16", "*": "rowwise"}}
    recipe = load({"base": base, "modules": {"layers.0.*": "tensorwise"}})
    assert list(recipe.modules) == ["*", "layers.0.*"]
    assert recipe.for_layer("layers.0.up").name == "tensorwise" and recipe.for_layer("layers.1.up").name == "rowwise"


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            "foldd",
            r"unknown recipe 'foldd'\. Did you mean 'folded'\? Recipes: folded, rotated, rotated_fast, folded_fast",
        ),
        ("Block", r"unknown recipe 'Block'\. Did you mean 'block'\?"),
        ("", r"unknown recipe ''\."),
        ({"base": "bloc"}, r"base 'bloc'\. Did you mean 'block'\?"),
        ({"dgard": {}}, r"recipe: unknown key 'dgard'\. Did you mean 'dgrad'\?"),
        ({"dgrad": {"wieght": {}}}, r"recipe: dgrad: unknown key 'wieght'\. Did you mean 'weight'\?"),
        ({"dgrad": {"weight": {"fmt": "e4m3"}}}, r"recipe: dgrad: weight: unknown key 'fmt'\. .*Known keys: format, "),
        ({"wgrad": {"weight": {}}}, r"recipe: wgrad: unknown key 'weight'.*Known keys: .*grad_output, input"),
        (
            {"fprop": {"input": {"format": "e4m4"}}},
            r"input: format: 'e4m4' is none of 'e4m3', 'e5m2', 'int8', 'e2m3', 'e3m2', 'e2m1'\. Did you mean 'e4m3'\?",
        ),
        ({"fprop": {"input": {"format": "e8m0"}}}, r"'e8m0' is none of"),
        ({"fprop": {"input": {"scaling": "pow2"}}}, r"scaling: 'pow2' is none of 'power_of_two', 'float32'"),
        ({"fprop": {"input": {"rounding": "nearst"}}}, r"rounding: 'nearst' .* Did you mean 'nearest'\?"),
        ({"dgrad": {"precision": "fp16"}}, r"dgrad: precision: 'fp16' is none of 'fp8', 'bf16'"),
        ({"dgrad": {"accumulate": True}}, r"dgrad: accumulate: True is none of 'slow', 'fast'"),
        ({"dgrad": {"weight": "row"}}, r"dgrad: weight: expected a table of settings, got 'row'"),
        ({"dgrad": "bf16"}, r"dgrad: expected a table of settings, got 'bf16'"),
        ({"fprop": {"input": {"granularity": 128}}}, r"input: granularity: expected str, got 128 \(int\)"),
        ({"name": 3}, r"recipe: name: expected str, got 3 \(int\)"),
        ({"modules": ["a"]}, r"modules: expected a table of patterns"),
        ({"modules": {"a": "foldd"}}, r"modules\.a.*'foldd'\. Did you mean 'folded'\?"),
        ({"modules": {"a": {"fpropp": {}}}}, r"modules\.a: unknown key 'fpropp'\. Did you mean 'fprop'\?"),
        ({"wgrad": {"accumulate": "fast"}}, r"wgrad\.accumulate = 'fast' is refused"),
        ({"history": {"lenght": 3}}, r"history: unknown key 'lenght'\. Did you mean 'length'\?"),
        ({"history": {"choose": "mean"}}, r"history: choose: 'mean' is none of 'max', 'last'"),
        ({"fprop": {"input": {"scale_from": "delay"}}}, r"scale_from: 'delay' is none of .*Did you mean 'delayed'\?"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_recipes_say_what_where_and_what_was_meant(recipe, message):
    with pytest.raises(ConfigError, match=message):
        load(recipe)


@pytest.mark.parametrize("recipe", [None, 8, ["folded"], {1: 2}], ids=str)
def test_anything_else_is_no_recipe(recipe):
    with pytest.raises(ConfigError):
        load(recipe)


def test_modules_inside_modules_are_refused_since_nobody_reads_them():
    with pytest.raises(ConfigError, match="modules"):
        load({"modules": {"layers.*": {"base": "block", "modules": {"layers.0.*": "bf16"}}}})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mine.toml", "base = ", r"mine\.toml: malformed toml"),
        ("mine.json", "{", r"mine\.json: malformed json"),
        ("mine.json", "[]", r"mine\.json: expected a table of settings, got list"),
        (
            "mine.toml",
            "[fprop]\nacumulate = 'slow'",
            r"mine\.toml: fprop: unknown key 'acumulate'\. Did you mean 'accumulate'\?",
        ),
        ("mine.toml", "base = 'blok'", r"mine\.toml: base 'blok'\. Did you mean 'block'\?"),
    ],
    ids=lambda value: value[:20],
)
def test_wrong_files_are_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / name)


def test_missing_file():
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read \(No such file or directory\)"):
        load("nowhere.toml")


def test_what_backward_keeps():
    assert kept_for_backward(load("folded")) == ["input codes of fprop", "weight codes of fprop"]
    assert kept_for_backward(load("rowwise")) == ["input codes of wgrad", "the weight itself"]
    assert kept_for_backward(load({"wgrad": {"precision": "bf16"}})) == ["input in BF16", "weight codes of fprop"]


def test_all_recipes_are_recipes():
    assert all(isinstance(load(name), Recipe) for name in EXPLAINED)


def test_layers_of_one_recipe_are_of_one_object():
    """They are computed together where they read the same input, which a look at the object decides."""
    changed = {"base": "tensorwise", "dgrad": {"precision": "bf16"}}
    modules = load({"modules": {"q": changed, "k": dict(changed), "v": "tensorwise"}}).modules
    assert modules["q"] is modules["k"] and modules["v"] == load("tensorwise")


@pytest.mark.parametrize("name", names())
def test_brief_of_a_preset_is_its_name(name):
    assert brief(load(name)) == name


@pytest.mark.parametrize(
    "recipe",
    [
        {"base": "block", "name": "mine", "history": {"length": 4}},
        {"base": "tensorwise", "name": "mine", "wgrad": {"precision": "bf16"}, "dgrad": {"precision": "bf16"}},
        {"base": "delayed", "name": "mine", "dgrad": {"accumulate": "fast"}},
        {"base": "folded", "name": "mine"},
    ],
)
def test_brief_is_what_was_changed(recipe):
    assert brief(load(recipe)) == recipe
    assert load(brief(load(recipe))) == load(recipe)


EVIDENCE = {"reason": "why", "loss_change": 1e-5}


def test_evidence():
    found = load({"modules": {"a": "bf16"}, "evidence": {"a": EVIDENCE}}).evidence["a"]
    assert (found.reason, found.loss_change, found.turned) == ("why", 1e-5, {})


@pytest.mark.parametrize(
    ("evidence", "message"),
    [
        ({"layers.1": EVIDENCE}, "Did you mean 'layers.0'"),
        ({"layers.0": {**EVIDENCE, "los_error": 1.0}}, "Did you mean 'loss_error'"),
        ({"layers.0": {"reason": "why"}}, "'loss_change' is missing"),
    ],
)
def test_evidence_is_read_strictly(evidence, message):
    with pytest.raises(ConfigError, match=message):
        load({"modules": {"layers.0": "bf16"}, "evidence": evidence})


def test_a_recipe_made_from_itself_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "own.toml": 'base = "own.toml"',
        "a.toml": 'base = "b.json"',
        "b.json": '{"modules": {"x": "a.toml"}}',
    }.items():
        Path(name).write_text(text)
    for name in ("own.toml", "a.toml", "b.json"):
        with pytest.raises(ConfigError, match=rf"the recipe {name} is made from itself"):
            load(name)
    deep = "folded"
    for _ in range(500):
        deep = {"base": deep}
    with pytest.raises(ConfigError, match="recipes are nested more than 16 deep"):
        load(deep)


@pytest.mark.parametrize(
    ("alias", "name", "gradients", "granularity"),
    [
        ("current", "tensorwise", "e5m2", "tensor"),
        ("hybrid", "tensorwise", "e5m2", "tensor"),
        ("per-tensor", "tensorwise", "e5m2", "tensor"),
        ("e4m3", "tensorwise_e4m3", "e4m3", "tensor"),
        ("blockwise", "block", "e4m3", "1x128"),
    ],
)
def test_names_of_the_guides_stand_for_a_preset(alias, name, gradients, granularity):
    recipe = load(alias)
    assert recipe == load(name) == load({"base": alias, "name": name}) and ALIASES[alias] == name not in ALIASES
    gradient = recipe.dgrad.grad_output
    assert (gradient.format, gradient.granularity, gradient.scale_from) == (gradients, granularity, "current")
    assert alias not in names()


def test_an_alias_is_suggested():
    with pytest.raises(ConfigError, match="Did you mean 'hybrid'"):
        load("hybrd")


@pytest.mark.parametrize(
    ("name", "preset"), [("rowwise_with_gw_hp", "rowwise_bf16_wgrad"), ("MXFP8BlockScaling", "mxfp8")]
)
def test_names_of_other_libraries(name, preset):
    with pytest.raises(ConfigError, match=f"unknown recipe '{name}'.*'{name}' is '{preset}' here"):
        load(name)
    assert load(preset).name == preset
