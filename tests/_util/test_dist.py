"""Who writes and prints; and that all ranks learn of an error of one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import ranks
import torch.distributed as dist

from octavo._util.dist import gather, in_process_group, is_first_rank, on_first_rank, together
from octavo.errors import CheckpointError, RunError


@pytest.mark.parametrize(
    ("launched", "in_group", "is_first"),
    [
        (None, None, True),
        ("0", None, True),
        ("3", None, False),
        (None, 0, True),
        (None, 1, False),
        ("3", 0, True),  # the group knows better: its ranks may be others
        ("0", 1, False),
    ],
)
def test_a_group_says_it_or_the_launcher(
    monkeypatch: pytest.MonkeyPatch, launched: str | None, in_group: int | None, is_first: bool
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if launched is not None:
        monkeypatch.setenv("RANK", launched)
    monkeypatch.setattr(dist, "is_initialized", lambda: in_group is not None)
    monkeypatch.setattr(dist, "get_rank", lambda: in_group)
    assert is_first_rank() == is_first
    assert in_process_group() == (in_group is not None)


class Foreign(Exception):
    """An error that cannot be sent to other ranks."""

    def __reduce__(self) -> Any:
        raise TypeError


def raise_(error: Exception) -> None:
    raise error


def failing(rank: int, count: int) -> list[str]:
    """Return what each failure of rank 1, and one of rank 0, raises here; none waits for it."""
    errors = (CheckpointError("damaged"), OSError(28, "full"), Foreign("strange"))
    said = []
    for kind, error in zip((CheckpointError, OSError, Foreign if rank == 1 else RunError), errors, strict=True):
        own = partial(raise_, error) if rank == 1 else lambda: None
        said.append(ranks.refusal(kind, partial(together, own)))
    with pytest.raises(CheckpointError) as raised:
        on_first_rank(lambda: raise_(CheckpointError(f"not written by {rank}")))
    return [*said, str(raised.value), *getattr(raised.value, "__notes__", [])]


def agreeing(rank: int, count: int) -> tuple[int, list[int], Any]:
    return together(lambda: rank), gather(10 * rank), on_first_rank(lambda: f"of {rank}")


def test_all_ranks_raise_what_one_does() -> None:
    first, second = ranks.run(failing, 2)
    assert first == ["damaged", "[Errno 28] full", "Foreign: strange", "not written by 0"]
    assert second == ["damaged", "[Errno 28] full", "strange", "not written by 0", "Raised on rank 0."]


def test_each_rank_has_its_result_or_that_of_the_first() -> None:
    assert ranks.run(agreeing, 2) == [(0, [0, 10], "of 0"), (1, [0, 10], "of 0")]


def test_without_a_group_an_action_just_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert (together(lambda: 3), on_first_rank(lambda: 4), gather(5)) == (3, 4, [5])
    with pytest.raises(Foreign):
        together(partial(raise_, Foreign()))
    monkeypatch.setenv("RANK", "1")
    assert on_first_rank(lambda: 4) is None
