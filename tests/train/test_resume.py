from __future__ import annotations

from pathlib import Path

import pytest

from octavo._util import config_reader
from octavo.errors import CheckpointError
from octavo.train.config import RunConfig, assemble, load_preset
from octavo.train.resume import FREE, check_same_run


def tiny(**run: object) -> RunConfig:
    return assemble(load_preset("tiny", cuda=False), ("test", {"run": run}))


def test_how_a_run_is_watched_and_kept_may_change() -> None:
    saved = config_reader.to_dict(tiny())
    check_same_run(
        saved,
        tiny(out="elsewhere", keep=9, log_every=1, eval_every=2, checkpoint_every=1, steps=99),
        Path("c"),
    )
    check_same_run(saved, tiny(tracker="mlflow", tracker_tensors=10, price_per_kwh=0.3, telemetry_every=2), Path("c"))


def test_what_decides_the_numbers_may_not() -> None:
    saved = config_reader.to_dict(tiny())
    with pytest.raises(
        CheckpointError, match=r"c: this is the checkpoint of another run: run.batch is 4 there and 8 here"
    ):
        check_same_run(saved, tiny(batch=8), Path("c"))


def test_a_key_that_this_version_does_not_know() -> None:
    saved = config_reader.to_dict(tiny())
    saved["run"]["magic"] = 1
    with pytest.raises(CheckpointError, match=r"run.magic"):
        check_same_run(saved, tiny(), Path("c"))


@pytest.mark.parametrize(
    ("section", "key"), [("run", "last_share"), ("optimizer", "decay"), ("guard", "layer_shift"), ("lora", "layers")]
)
def test_a_key_that_the_checkpoint_does_not_know_had_its_default(section: str, key: str) -> None:
    saved = config_reader.to_dict(tiny())
    del saved[section][key]
    check_same_run(saved, tiny(), Path("c"))


def test_every_free_key_exists() -> None:
    settings = config_reader.to_dict(tiny())
    assert {f"{section}.{key}" for section, keys in settings.items() for key in keys} >= FREE
