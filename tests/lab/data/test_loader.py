from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import CheckpointError, ConfigError, DataError
from octavo.lab.data import Loader, heldout_batches
from octavo.lab.data.loader import FIRST, NO_TARGET, digest, permutation


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,003 ids that count up: a window is known by its first id."""
    path = tmp_path_factory.mktemp("tokens") / "train.bin"
    np.arange(1003, dtype="<u2").tofile(path)
    return path


def starts(loader: Loader, steps: int) -> list[int]:
    return [int(row[0]) for _ in range(steps) for row in next(loader)[0]]


def test_targets_are_the_next_tokens(path: Path) -> None:
    inputs_BT, targets_BT = next(Loader(path, 4, 10, seed=0))
    assert inputs_BT.shape == targets_BT.shape == (4, 10)
    assert inputs_BT.dtype == targets_BT.dtype == torch.int64
    assert inputs_BT.is_contiguous() and targets_BT.is_contiguous()
    assert torch.equal(targets_BT, inputs_BT + 1)


def test_one_pass_visits_every_window_once_in_another_order_each_time(path: Path) -> None:
    loader = Loader(path, 5, 10, seed=0)
    first, second = starts(loader, 20), starts(loader, 20)
    assert sorted(first) == sorted(second) == list(range(0, 1000, 10))
    assert first != second != sorted(second)


def test_a_batch_may_straddle_two_passes(path: Path) -> None:
    loader = Loader(path, 30, 10, seed=3)
    seen = starts(loader, 10)
    assert all(sorted(seen[i : i + 100]) == list(range(0, 1000, 10)) for i in (0, 100, 200))


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 12), st.integers(0, 2**63))
def test_ranks_share_out_what_one_would_visit(path: Path, world: int, batch: int, steps: int, seed: int) -> None:
    alone = Loader(path, batch * world, 10, seed)
    ranks = [Loader(path, batch, 10, seed, rank, world) for rank in range(world)]
    for _ in range(steps):
        parts = [next(rank)[0] for rank in ranks]
        assert torch.equal(torch.cat(parts), next(alone)[0])


@settings(max_examples=25)
@given(st.integers(0, 30), st.integers(1, 30), st.integers(0, 1))
def test_resume_is_exact(path: Path, before: int, after: int, rank: int) -> None:
    loader = Loader(path, 7, 10, seed=5, rank=rank, world=2)
    starts(loader, before)
    state = loader.state_dict()
    resumed = Loader(path, 7, 10, seed=5, rank=rank, world=2)
    starts(resumed, 3)
    resumed.load_state_dict(state)
    for _ in range(after):
        expected, actual = next(loader), next(resumed)
        assert torch.equal(expected[0], actual[0]) and torch.equal(expected[1], actual[1])
    assert loader.state_dict() == resumed.state_dict()


def test_resume_on_another_number_of_ranks_continues_the_same_stream(path: Path) -> None:
    loader, alone = Loader(path, 6, 10, seed=5), Loader(path, 6, 10, seed=5)
    starts(loader, 4)
    starts(alone, 4)
    pair = [Loader(path, 3, 10, seed=5, rank=rank, world=2) for rank in (0, 1)]
    for rank in pair:
        rank.load_state_dict(loader.state_dict())
    assert torch.equal(torch.cat([next(rank)[0] for rank in pair]), next(alone)[0])


@pytest.mark.parametrize(("batch", "sequence", "seed"), [(5, 20, 5), (5, 10, 6)])
def test_a_position_in_another_stream_is_refused(path: Path, batch: int, sequence: int, seed: int) -> None:
    state = Loader(path, 5, 10, seed=5).state_dict()
    with pytest.raises(CheckpointError, match="resume with the same"):
        Loader(path, batch, sequence, seed).load_state_dict(state)


def test_a_position_in_another_corpus_or_none_is_refused(path: Path, tmp_path: Path) -> None:
    np.arange(900, dtype="<u2").tofile(tmp_path / "other.bin")
    loader = Loader(path, 5, 10, seed=5)
    with pytest.raises(CheckpointError, match="tokens 1003, this run has 900"):
        Loader(tmp_path / "other.bin", 5, 10, seed=5).load_state_dict(loader.state_dict())
    with pytest.raises(CheckpointError, match="None"):
        loader.load_state_dict({k: v for k, v in loader.state_dict().items() if k != "samples"})


@pytest.mark.parametrize("name", ["other.bin", "other.u32"])
def test_a_position_in_other_content_of_the_same_size_is_refused(path: Path, tmp_path: Path, name: str) -> None:
    ids = np.arange(1003, dtype="<u4" if name.endswith(".u32") else "<u2")
    ids[[0, 700]] += 1
    ids.tofile(tmp_path / name)
    state = Loader(path, 5, 10, seed=5).state_dict()
    other = Loader(tmp_path / name, 5, 10, seed=5)
    with pytest.raises(CheckpointError, match=f"another corpus of 1,003 tokens: .*{state['digest']} there"):
        other.load_state_dict(state)
    assert other.state_dict()["samples"] == 0


def test_a_position_without_a_digest_of_an_earlier_version_is_loaded(path: Path) -> None:
    loader, resumed = Loader(path, 5, 10, seed=5), Loader(path, 5, 10, seed=5)
    starts(loader, 3)
    resumed.load_state_dict({key: value for key, value in loader.state_dict().items() if key != "digest"})
    assert resumed.state_dict() == loader.state_dict()


@settings(max_examples=25)
@given(st.integers(1, 64 * 2048), st.data())
def test_the_digest_of_a_short_file_is_of_every_id(length: int, data: st.DataObject) -> None:
    ids = np.zeros(length, dtype="<u2")
    before = digest(ids)
    ids[data.draw(st.integers(0, length - 1))] = 1
    assert digest(ids) != before != digest(np.zeros(length + 1, dtype="<u2"))


def test_the_digest_of_a_long_file_reads_little_of_it(tmp_path: Path) -> None:
    with (tmp_path / "train.bin").open("wb") as file:
        file.truncate(1 << 36)  # 64 GiB without a block on disk
    tokens = np.memmap(tmp_path / "train.bin", dtype="<u2", mode="r")
    assert digest(tokens) != digest(tokens[1:])


def test_the_digest_is_pinned_across_versions() -> None:
    assert digest(np.arange(10**6, dtype="<u4")).startswith("f2dced8607fe3e38")


def test_seeds_differ_and_repeat(path: Path) -> None:
    assert starts(Loader(path, 5, 10, seed=1), 4) == starts(Loader(path, 5, 10, seed=1), 4)
    assert starts(Loader(path, 5, 10, seed=1), 4) != starts(Loader(path, 5, 10, seed=2), 4)


def test_the_order_is_pinned_across_versions_of_numpy() -> None:
    assert permutation(seed=1, epoch=2, windows=8).tolist() == [4, 2, 0, 6, 1, 5, 7, 3]


def test_a_corpus_shorter_than_one_batch_gives_the_numbers(path: Path) -> None:
    Loader(path, 50, 10, seed=0, world=2)
    with pytest.raises(DataError, match=r"1,003 tokens.*needs 1,011 \(1 x 101 sequences of 10\)"):
        Loader(path, 101, 10, seed=0)
    with pytest.raises(DataError, match=r"needs 1,021 \(2 x 51 sequences of 10\)"):
        Loader(path, 51, 10, seed=0, world=2)
    with pytest.raises(DataError, match=r"^notes\.txt: the corpus has 1,003 tokens"):
        Loader(path, 101, 10, seed=0, source="notes.txt")


def test_the_shortest_corpus_that_does(tmp_path: Path) -> None:
    np.arange(41, dtype="<u2").tofile(tmp_path / "a.bin")
    assert len(starts(Loader(tmp_path / "a.bin", 4, 10, seed=0), 3)) == 12


@pytest.mark.parametrize("content", [b"", b"abc"])
def test_a_file_that_holds_no_tokens(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(DataError, match="16-bit token ids"):
        Loader(tmp_path / "a.bin", 1, 1, seed=0)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        heldout_batches(tmp_path / "gone.bin", 1, 1)


@pytest.mark.parametrize("change", [{"batch": 0}, {"sequence": 0}, {"world": 0}, {"rank": 1}, {"rank": -1}])
def test_sizes_that_make_no_sense(path: Path, change: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        Loader(path, **{"batch": 1, "sequence": 1, "seed": 0, **change})


@pytest.mark.parametrize("batch", [1, 7, 64, 1000])
def test_heldout_batches_run_in_order_and_have_every_window_once(path: Path, batch: int) -> None:
    batches = list(heldout_batches(path, batch, 10))
    inputs = torch.cat([inputs_BT.flatten() for inputs_BT, _ in batches])
    assert all(inputs_BT.shape == (batch, 10) for inputs_BT, _ in batches[:-1])
    assert torch.equal(inputs, torch.arange(100 * 10))
    assert all(torch.equal(targets_BT, inputs_BT + 1) for inputs_BT, targets_BT in batches)


@pytest.mark.parametrize(("limit", "windows"), [(1, 1), (70, 7), (71, 8), (None, 100), (10**9, 100)])
@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_heldout_batches_stop_at_the_limit(path: Path, batch: int, limit: int | None, windows: int) -> None:
    assert sum(len(inputs_BT) for inputs_BT, _ in heldout_batches(path, batch, 10, limit)) == windows


def test_a_heldout_text_shorter_than_a_batch_is_one_smaller_batch(path: Path) -> None:
    ((inputs_BT, _),) = heldout_batches(path, 64, 100)
    assert inputs_BT.shape == (10, 100)
    with pytest.raises(DataError, match=r"1,003 held-out tokens.*1003"):
        heldout_batches(path, 1, 1003)
    with pytest.raises(DataError, match=r"^notes\.txt: 1,003 held-out tokens"):
        heldout_batches(path, 1, 1003, source="notes.txt")


def test_a_document_that_begins_with_id_0_is_flagged_and_ids_that_are_no_targets_are_ignored(tmp_path: Path) -> None:
    """As its complement, -1: its negative would be 0."""
    ids = np.array([0 | FIRST, 5, 0 | NO_TARGET, 7 | FIRST | NO_TARGET, 0], dtype="<u4")
    ids.tofile(tmp_path / "train.u32")
    ((inputs, targets),) = heldout_batches(tmp_path / "train.u32", 1, 4)
    assert inputs.tolist() == [[-1, 5, 0, -8]] and targets.tolist() == [[5, -100, -100, 0]]


def test_separate_documents_are_flagged_and_their_first_ids_are_no_targets(tmp_path: Path) -> None:
    path, end = tmp_path / "train.bin", 9
    np.array([1, 2, end, 3, end, end, 4, 5, 6, 7, 8], dtype="<u2").tofile(path)
    inputs_BT, targets_BT = next(heldout_batches(path, 2, 5, separate=end))
    assert inputs_BT.tolist() == [[~1, 2, end, ~3, end], [~end, ~4, 5, 6, 7]]
    assert targets_BT.tolist() == [[2, end, -100, end, -100], [-100, 5, 6, 7, 8]]
    joined = next(heldout_batches(path, 2, 5))  # nothing is padding, and nothing lost
    assert torch.equal(torch.where(inputs_BT < 0, ~inputs_BT, inputs_BT), joined[0])
    assert torch.equal(targets_BT[targets_BT >= 0], joined[1][targets_BT >= 0])


def test_separate_documents_of_a_wide_vocabulary(tmp_path: Path) -> None:
    path, end = tmp_path / "train.u32", 70_000
    np.array([1, end, 70_001, 3], dtype="<u4").tofile(path)
    inputs_BT, targets_BT = next(heldout_batches(path, 1, 3, separate=end))
    assert inputs_BT.tolist() == [[~1, end, ~70_001]] and targets_BT.tolist() == [[end, -100, 3]]


def test_separate_documents_resume_at_the_next_batch(path: Path) -> None:
    first, again = (Loader(path, 4, 10, seed=0, separate=7) for _ in range(2))
    next(first)
    again.load_state_dict(first.state_dict())
    assert all(torch.equal(*pair) for pair in zip(next(first), next(again), strict=True))
