"""Who writes and prints."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from octavo._util.dist import in_process_group, is_first_rank


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
