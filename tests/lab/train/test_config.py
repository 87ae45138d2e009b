from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import recipes
from octavo._util import config_reader
from octavo._util.recipe_names import DEFAULT, FALLBACK
from octavo.errors import ConfigError, DataError
from octavo.lab.models import Llama, count_parameters
from octavo.lab.train.config import (
    LoopConfig,
    OptimizerConfig,
    RunConfig,
    assemble,
    load_file,
    load_preset,
    presets,
    reason_for_fallback,
)
from octavo.optim import TIERS

TINY = load_preset("tiny", cuda=False)


def with_settings(**sections: Any) -> RunConfig:
    return assemble(TINY, ("run.toml", sections))


@pytest.mark.parametrize("name", presets())
def test_presets_can_be_read(name: str) -> None:
    assert assemble(load_preset(name, cuda=False)).run.steps > 0


def test_the_large_parity_study_has_350_million_parameters_and_100_million_tokens() -> None:
    config = assemble(load_preset("parity-350m-cuda", cuda=True))
    with torch.device("meta"):
        model = Llama(config.model)
    assert 340e6 < count_parameters(model) < 360e6
    assert config.tokens >= 100e6
    assert 128_000 <= config.run.batch * config.data.sequence <= 160_000
    with torch.device("meta"):
        largest = Llama(assemble(load_preset("parity-1b-cuda", cuda=True)).model)
    assert 1.0e9 < count_parameters(largest) < 1.1e9


def test_demo_is_what_the_device_can_carry() -> None:
    assert load_preset("demo", cuda=True) == load_preset("demo-cuda", cuda=False)
    assert load_preset("demo", cuda=False) == load_preset("demo-cpu", cuda=True)


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no preset 'dmo'. Did you mean 'demo'"):
        load_preset("dmo", cuda=False)


def test_later_layers_win_key_by_key() -> None:
    config = assemble(TINY, ("file", {"run": {"steps": 7, "seed": 3}}), ("flags", {"run": {"steps": 9}}))
    assert (config.run.steps, config.run.seed, config.run.batch) == (9, 3, 4)


def test_errors_name_the_layer_the_key_and_what_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"flags: run.*'stepz'.*Did you mean 'steps'"):
        assemble(TINY, ("file", {"run": {"steps": 7}}), ("flags", {"run": {"stepz": 9}}))
    with pytest.raises(ConfigError, match=r"run.toml.*'optimiser'.*Did you mean 'optimizer'"):
        with_settings(optimiser={"lr": 1.0})


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("run", "steps", 0, "run.steps"),
        ("run", "steps", "many", "steps"),
        ("run", "accumulate", 3, "does not divide run.batch 4"),
        ("run", "compile", "maybe", "'maybe'"),
        ("data", "heldout", 0.9, "data.heldout"),
        ("data", "sequence", 0, "data.sequence"),
        ("optimizer", "lr", -1.0, "optimizer.lr"),
        ("optimizer", "betas", [0.9, 1.0], "optimizer.betas"),
        ("optimizer", "betas", [0.9], "betas"),
        ("optimizer", "warmup", 1.5, "optimizer.warmup"),
        ("optimizer", "loss_scale", "dynamc", "'dynamc'.*Did you mean 'dynamic'"),
        ("optimizer", "states", "fp8-mim", "'fp8-mim'.*Did you mean 'fp8-min'"),
        ("optimizer", "loss_scale_start", 100.0, "optimizer.loss_scale_start: 100.0 is not a power of two"),
        ("optimizer", "loss_scale_window", 0, "optimizer.loss_scale_window"),
        ("optimizer", "clip_per_group", {"*.wq": 0.0}, r"optimizer.clip_per_group.'\*.wq'"),
        ("optimizer", "lr_factors", {"*.wq": -1.0}, r"optimizer.lr_factors.'\*.wq'"),
        ("optimizer", "lr_factors", {"*.wq": "half"}, r"lr_factors.\*.wq: expected float"),
        ("run", "bf16_first_steps", -1, "run.bf16_first_steps"),
        ("run", "last_share", 1.5, "run.last_share"),
        ("model", "heads", 5, "model.heads"),
        ("model", "sequence", 8, "exceeds model.sequence 8"),
    ],
)
def test_impossible_values_are_named(section: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_settings(**{section: {key: value}})


@pytest.mark.parametrize("section", [each.name for each in dataclasses.fields(RunConfig)])
@pytest.mark.parametrize("others", [{}, {"run": {"start_from": "somewhere"}}])
def test_section_that_is_no_table(section: str, others: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"run.toml: {section}: expected a table of settings, got 3"):
        with_settings(**others | {section: 3})


def test_the_data_decides_vocabulary_and_sequence_of_the_model() -> None:
    config = with_settings(data={"sequence": 48, "tokenizer": "bpe-512"})
    assert (config.model.vocab, config.model.sequence) == (512, 48)
    assert with_settings().model.vocab == 272


def test_a_file_names_its_run(tmp_path: Path) -> None:
    file = tmp_path / "first.toml"
    file.write_text("[run]\nsteps = 3\n", encoding="utf-8")
    assert assemble(TINY, load_file(file)).run.out == Path("runs/first")


def test_a_stored_configuration_reads_back(tmp_path: Path) -> None:
    config = with_settings(run={"steps": 3})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_reader.to_dict(config)), encoding="utf-8")
    assert assemble(load_file(file)) == config


def test_a_stored_configuration_reads_back_without_its_tokenizer() -> None:
    stored = config_reader.to_dict(with_settings(data={"tokenizer": "bpe-512"}))
    stored["data"]["tokenizer"] = "gone/tokenizer.json"
    assert assemble(("stored", stored)).model.vocab == 512
    del stored["model"]["vocab"]
    with pytest.raises(DataError, match="there is no such tokenizer file"):
        assemble(("stored", stored))


@pytest.mark.parametrize(("key", "value"), [("level", 1), ("level", 3), ("defaults", "guides")])
def test_defaults_of_a_configuration_that_is_complete_are_refused(key: str, value: Any) -> None:
    stored = config_reader.to_dict(with_settings())
    with pytest.raises(ConfigError, match=rf"flags: run\.{key}: .* has no effect: .* sets .* itself"):
        assemble(("stored", stored), ("flags", {"run": {key: value}}))
    own = config_reader.to_dict(with_settings(run={key: value}))
    assert assemble(("stored", own), ("flags", {"run": {key: value}})) == with_settings(run={key: value})


def test_nothing_given() -> None:
    with pytest.raises(ConfigError, match=r"presets? .*tiny"):
        assemble()


def test_tokens_of_a_run() -> None:
    assert with_settings(run={"steps": 10}).tokens == 10 * 4 * 32


def test_every_tier_of_optimizer_states_can_be_asked_for() -> None:
    # The configuration imports no torch, so it has the names itself.
    assert set(typing.get_args(typing.get_type_hints(OptimizerConfig)["states"])) == set(TIERS)


@pytest.mark.parametrize(
    ("level", "gradients", "reduce", "states", "weights", "activations"),
    [
        (0, "wide", None, "fp32", "fp32", "bf16"),
        (1, "fp8", "fp8-lm", "fp32", "bf16", "bf16"),
        (2, "fp8", "fp8-lm", "fp8-lm", "bf16", "bf16"),
        (3, "fp8", "fp8-lm", "fp8-lm", "fp8", "fp8"),
    ],
)
def test_a_level_sets_what_no_other_layer_does(
    level: int, gradients: str, reduce: str | None, states: str, weights: str, activations: str
) -> None:
    keys = {"gradients": gradients, "reduce": reduce, "states": states, "weights": weights, "activations": activations}
    config = with_settings(run={"level": level})
    found = {
        **{key: getattr(config.optimizer, key) for key in ("gradients", "states")},
        **{key: getattr(config.parallel, key) for key in ("reduce", "activations")},
        "weights": config.run.weights,
    }
    assert found == keys
    own = with_settings(run={"level": level, "weights": "fp32"}, optimizer={"states": "exact"})
    assert (own.run.weights, own.optimizer.states, own.optimizer.gradients) == ("fp32", "exact", keys["gradients"])
    assert assemble(("again", config_reader.to_dict(config))) == config


def test_defaults_of_guides_are_set_where_no_other_layer_sets_them() -> None:
    config = with_settings(run={"defaults": "guides"}, optimizer={"weight_decay": 0.02})
    found = config.run.recipe, config.optimizer.loss_scale, config.optimizer.weight_decay, config.optimizer.min_lr
    assert found == ("delayed", "dynamic", 0.02, 0.01)
    assert with_settings(run={"defaults": "guides", "recipe": "hybrid", "level": 2}, optimizer={"gradients": "wide"})
    assert with_settings().run.recipe == DEFAULT and with_settings().optimizer.loss_scale == "none"
    assert assemble(("again", config_reader.to_dict(config))) == config
    with pytest.raises(ConfigError, match=r"run: defaults.*'guide'"):
        with_settings(run={"defaults": "guide"})


@pytest.mark.parametrize(("level", "recipe"), [(1, "delayed"), (2, "delayed"), (3, FALLBACK)])
def test_defaults_of_guides_go_with_every_level(level: int, recipe: str) -> None:
    config = with_settings(run={"defaults": "guides", "level": level})
    found = config.run.recipe, config.optimizer.loss_scale, config.optimizer.weight_decay, config.optimizer.min_lr
    assert found == (recipe, "none", 0.01, 0.01)
    assert assemble(("again", config_reader.to_dict(config))) == config


def test_a_loss_scale_that_the_user_sets_beside_fp8_gradients_is_refused_also_with_defaults_of_guides() -> None:
    with pytest.raises(ConfigError, match=r"loss_scale.*gradients is set by run.level = 1"):
        with_settings(run={"defaults": "guides", "level": 1}, optimizer={"loss_scale": "dynamic"})


def test_a_level_that_is_none_is_refused() -> None:
    for wrong in (4, "three", True, False, 1.0):
        with pytest.raises(ConfigError, match=r"run(: |\.)level"):
            with_settings(run={"level": wrong})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_schedule": "wsd", "warmup": 0.5, "decay": 0.6}, "more than the whole run"),
        ({"lr_schedule": "plateau"}, r"run\.eval_every"),
        ({"patience": 0}, r"optimizer\.patience"),
        ({"decay": 1.5}, r"optimizer\.decay"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_settings(optimizer=settings)


@pytest.mark.parametrize(
    ("first", "share", "bf16", "last"),
    [(0, 0.0, [], []), (3, 0.0, [0, 1, 2], []), (0, 0.2, [], [8, 9]), (1, 0.04, [0], []), (99, 0.06, range(10), [9])],
)
def test_the_precision_of_each_step(first: int, share: float, bf16: Sequence[int], last: Sequence[int]) -> None:
    run = LoopConfig(steps=10, bf16_first_steps=first, last_share=share)
    assert [step for step in range(10) if run.is_bf16(step)] == list(bf16)
    assert [step for step in range(10) if run.is_last(step)] == list(last)


def test_a_last_recipe_needs_weights_that_it_can_read_in_bf16() -> None:
    with pytest.raises(ConfigError, match=r"run\.last_share.*'bf16'"):
        LoopConfig(weights="fp8", last_share=0.2)


# --- the recipe of a run that names none ----------------------------------------------------------------------------

SAID = "recipe 'folded' in place of the default, 'rotated': "


def test_a_run_without_a_recipe_has_the_default() -> None:
    config = with_settings()
    assert config.run.recipe == DEFAULT == recipes.DEFAULT == LoopConfig().recipe
    assert reason_for_fallback(config) == ""


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"run": {"weights": "fp8"}}, "weights stored in FP8"),
        ({"run": {"level": 3}}, "weights stored in FP8"),
        ({"model": {"architecture": "moe"}}, "not of experts"),
        (
            {"model": {"dim": 64, "heads": 8, "kv_heads": 8, "ffn": 512}, "parallel": {"tensor": 8}},
            "no rotation by 16 or more divides the 8 inputs of a rank",
        ),
    ],
)
def test_what_the_default_refuses_is_trained_by_folded_and_said(sections: dict[str, Any], why: str) -> None:
    config = with_settings(**sections)
    assert config.run.recipe == recipes.FALLBACK == "folded"
    said = reason_for_fallback(config)
    assert said.startswith(SAID) and why in said
    named = with_settings(**{**sections, "run": {**sections.get("run", {}), "recipe": "rotated"}})
    assert named.run.recipe == "rotated" and reason_for_fallback(named) == ""


@pytest.mark.parametrize("dim", [128, 192])  # ranks rotate by the same blocks, by smaller ones
def test_tensor_parallelism_keeps_the_default(dim: int) -> None:
    config = with_settings(model={"dim": dim, "heads": 2, "ffn": 2 * dim}, parallel={"tensor": 2})
    assert config.run.recipe == "rotated" and reason_for_fallback(config) == ""


def test_the_recipe_of_the_guides_stays_theirs() -> None:
    assert with_settings(run={"defaults": "guides"}).run.recipe == "delayed"
    assert with_settings(run={"defaults": "guides", "recipe": "rotated"}).run.recipe == "rotated"


def test_a_configuration_that_a_run_wrote_without_a_recipe_means_folded() -> None:
    written = config_reader.to_dict(with_settings())
    assert assemble(("config.json", written)).run.recipe == "rotated"
    del written["run"]["recipe"]
    assert assemble(("config.json", written)).run.recipe == recipes.BASE == "folded"
