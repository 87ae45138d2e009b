"""Drift of batches and loss by source: what is measured, and when the rules speak."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.lab.data import ByteTokenizer, prepare
from octavo.lab.data.encode import source_of
from octavo.lab.doctor.check import run_check
from octavo.lab.doctor.data import data
from octavo.lab.doctor.subjects import trial_of_config
from octavo.lab.monitor.dashboard.verdict import of_data
from octavo.lab.monitor.store import RunReader
from octavo.lab.train import train
from octavo.lab.train.batches import BatchDrift, SourceLosses
from octavo.lab.train.run import Trainer
from octavo.lab.train.setup import set_up

END = ByteTokenizer.end_of_document


@pytest.fixture
def drift(tmp_path: Path) -> BatchDrift:
    ids = np.random.default_rng(0).choice(4, size=40_000, p=[0.4, 0.3, 0.2, 0.1]).astype("<u2") + 97
    ids[::100] = END
    (tmp_path / "train.bin").write_bytes(ids.tobytes())
    return BatchDrift(tmp_path / "train.bin", 272, END)


def batch(seed: int, shares: list[float]) -> torch.Tensor:
    ids = np.random.default_rng(seed).choice(4, size=(8, 64), p=shares) + 97
    ids[:, ::32] = END
    return torch.from_numpy(ids)


def test_the_divergence_is_that_of_kullback_and_leibler(drift: BatchDrift) -> None:
    inputs = torch.full((2, 8), 98)
    found = drift.measure(inputs)
    assert found["batch_divergence"] == pytest.approx(-math.log(0.3), abs=0.05)
    assert found["batch_document_tokens"] == 16
    inputs[:, 0] = ~END
    assert drift.measure(inputs)["batch_document_tokens"] == 8


def test_batches_that_change_are_noticed_once(drift: BatchDrift) -> None:
    def seen(seeds: range, shares: list[float]) -> list[int]:
        return [s for s in seeds if drift.drifts(drift.measure(batch(s, shares))["batch_divergence"])]

    assert seen(range(300), [0.4, 0.3, 0.2, 0.1]) == []
    changed = seen(range(300, 340), [0.1, 0.2, 0.3, 0.4])
    assert len(changed) == 1 and changed[0] < 304


def test_one_batch_far_from_the_others_is_not_a_drift(drift: BatchDrift) -> None:
    usual = [0.40, 0.42, 0.38, 0.41, 0.39] * 4
    assert not any(drift.drifts(seen) for seen in [*usual, 2.4, *usual, *usual, *usual])
    assert [seen for seen in (0.8, 0.8, 0.8, 0.8) if drift.drifts(seen)] == [0.8]


def test_a_source_that_rises_alone_is_named() -> None:
    sources = SourceLosses((("a", 0), ("b", 20), ("a", 40)), 10)
    losses = sources.by_source(torch.tensor([1.0, 3.0, 5.0, 7.0, 2.0]))
    assert losses == {"a": 2.0, "b": 6.0}
    assert SourceLosses((("a", 0),), 10).by_source(torch.ones(3)) == {}
    assert [*sources.rises(3.0, losses)] == []
    assert [*sources.rises(2.9, {"a": 1.5, "b": 6.2})] == []
    assert [*sources.rises(2.9, {"a": 1.4, "b": 6.4})] == [("b", 6.4, pytest.approx(6.3))]
    assert [*sources.rises(4.0, {"a": 3.0, "b": 9.0})] == []  # all of it rises: another rule's


def test_sources_are_folders_and_files_of_several_documents(tmp_path: Path) -> None:
    assert [*map(source_of, ("a/b/c.txt", "chat.jsonl:12", "c.txt"))] == ["a", "chat.jsonl", ""]
    for name in ("a/1.txt", "a/2.txt", "b/1.txt", "b/2.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name} " * 20)
    files = prepare(tmp_path, ByteTokenizer(), tmp_path / ".cache", heldout=0.5)
    assert dict(files.heldout_sources).keys() <= {"a", "b"} and files.heldout_sources[0][1] == 0


def test_a_run_records_drift_sources_and_faults_of_its_text(configure: Callable[..., Any], tmp_path: Path) -> None:
    source = tmp_path / "text"
    for folder in ("one", "two"):
        (source / folder).mkdir(parents=True)
        for number in range(20):
            text = " ".join(f"{folder} {number * i}" for i in range(40)) if number else "the same text twice " * 20
            (source / folder / f"{number}.txt").write_text(text)
    (source / "two" / "0.txt").write_text("the same text twice " * 20 + "!")
    run = {"steps": 2, "eval_every": 1, "log_every": 1, "baseline": False, "eval_tokens": 2048}
    config = configure(data={"source": str(source), "heldout": 0.3}, run=run)
    train(config)
    lines = [json.loads(line) for line in (config.run.out / "metrics.jsonl").read_text().splitlines()]
    assert all(line["batch_divergence"] > 0 for line in lines if "lr" in line)
    assert {"heldout_loss/one", "heldout_loss/two"} < {*lines[1]}
    reader = RunReader(config.run.out)
    said = [event.text for event in reader.events() if event.rule == "data"]
    assert len(said) == len([*of_data(reader)])
    found = run_check(data, trial_of_config(config)).finding
    assert said and (str(found.verdict), found.seen) == ("warning", said[0])

    resumed = Trainer(set_up(config.with_run(steps=3), resume=True), [])
    resumed.resume()
    try:
        resumed.log.open(resumed._resumed)
        assert [*resumed.log._drift._past] == [line["batch_divergence"] for line in lines if "lr" in line]
        one, two, whole = (lines[1][f"heldout_loss{name}"] for name in ("/one", "/two", "_fp8"))
        assert resumed.log._sources._best == {"": whole, "one": one, "two": two}
    finally:
        resumed.log.close()
