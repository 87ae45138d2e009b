from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.errors import DataError
from octavo.lab.data import ByteTokenizer
from octavo.lab.evaluation.text import SequenceLayout, heldout_text, trained_on, whole_text
from octavo.lab.models.config import ModelConfig
from octavo.lab.train.config import DataConfig, RunConfig

BYTES = ByteTokenizer()


def documents(folder: Path, *texts: str) -> str:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return str(folder)


def test_all_of_a_text_in_order(tmp_path):
    source = documents(tmp_path / "text", "abcde", "fghijklm")
    text = whole_text(source, BYTES, SequenceLayout(sequence=3, rows=2))
    assert (text.sequences, text.tokens, len(text), text.is_heldout) == (4, 12, 2, False)
    inputs, targets = (torch.cat(part).flatten().tolist() for part in zip(*text, strict=True))
    ids = [*b"abcde", 256, *b"fghijklm", 256]
    assert inputs == ids[:12] and targets == ids[1:13]
    assert text.bytes == 11  # of 12 targets one is the end of a document


def test_what_is_left_over_is_a_smaller_batch(tmp_path):
    source = documents(tmp_path / "text", "abcdefghijk")
    batches = list(whole_text(source, BYTES, SequenceLayout(sequence=3, rows=2)))
    assert [list(inputs.shape) for inputs, _ in batches] == [[2, 3], [1, 3]]


@pytest.mark.parametrize(("limit", "sequences"), [(1, 1), (3, 1), (4, 2), (100, 5)])
def test_a_limit_is_reached_by_whole_sequences(tmp_path, limit, sequences):
    source = documents(tmp_path / "text", "abcdefghijklmno")
    assert whole_text(source, BYTES, SequenceLayout(sequence=3, rows=2, limit=limit)).sequences == sequences


def run_on(data, **model):
    return RunConfig(model=ModelConfig(vocab=272, dim=16, layers=1, heads=2, sequence=256, **model), data=data)


def test_the_first_ids_of_separate_documents_are_not_scored(tmp_path):
    source = documents(tmp_path / "text", *(f"text {number}, and so on" for number in range(30)))
    data = DataConfig(source=source, cache=tmp_path / "cache", heldout=0.3, sequence=64)
    layout = SequenceLayout(sequence=64, rows=4, separate=BYTES.end_of_document)
    text, _ = heldout_text(run_on(data, documents="separate"), BYTES, layout)
    targets_BT = torch.cat([targets for _, targets in text])
    assert 0 < text.tokens == int((targets_BT >= 0).sum()) < text.sequences * 64
    assert text.bytes == int(((targets_BT >= 0) & (targets_BT < 256)).sum())


def test_what_a_run_holds_out_is_what_it_was_evaluated_on(tmp_path):
    source = documents(tmp_path / "text", *(f"text number {number}, and so on" for number in range(30)))
    data = DataConfig(source=source, cache=tmp_path / "cache", heldout=0.3)
    text, digest = heldout_text(run_on(data), BYTES, SequenceLayout(sequence=8, rows=4))
    (folder,) = (tmp_path / "cache").iterdir()
    ids = np.fromfile(folder / "heldout.bin", dtype="<u2")
    assert text.is_heldout and text.sequences == (len(ids) - 1) // 8 and np.array_equal(text.ids, ids)
    assert digest in (folder / "meta.json").read_text()


def test_too_little_text(tmp_path):
    with pytest.raises(DataError, match=r"4 tokens are fewer than one sequence of 8 .* shorter --sequence"):
        whole_text(documents(tmp_path / "short", "abc"), BYTES, SequenceLayout(sequence=8, rows=4))
    with pytest.raises(DataError, match="the file is empty"):
        whole_text(documents(tmp_path / "empty", ""), BYTES, SequenceLayout(sequence=8, rows=4))
    data = DataConfig(source=documents(tmp_path / "few", "abcd", "efgh"), cache=tmp_path / "cache")
    with pytest.raises(DataError, match="5 held-out tokens are fewer"):
        heldout_text(run_on(data), BYTES, SequenceLayout(sequence=8, rows=4))


def test_a_run_that_has_not_ended_does_not_say_what_it_read(tmp_path):
    assert trained_on(tmp_path) == ""
