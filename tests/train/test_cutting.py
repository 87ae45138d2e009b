"""What `parallel.tensor` refuses, before anything is started. Runs that are cut are in test_parallel.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.train.config import RunConfig
from octavo.train.cutting import check_cut

Configure = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("sections", "shards", "message"),
    [
        ({"model": {"architecture": "gpt"}}, 1, r"parallel.tensor: 2: .* 'gpt' cannot be cut, only a 'llama'"),
        ({"model": {"heads": 1}}, 1, r"model.heads: 1 cannot be split evenly over 2 ranks"),
        ({"model": {"kv_heads": 1}}, 1, r"model.kv_heads: 1 cannot .* Take a multiple of 2, or fewer ranks"),
        ({"data": {"sequence": 31}}, 1, r"data.sequence: 31 cannot"),
        ({"model": {"ffn": 66}}, 2, r"model.ffn: 66 cannot be split evenly over 4 ranks .* sharded over 2"),
        ({"model": {"ffn": 65}}, 1, r"model.ffn: 65 cannot"),
        ({"run": {"recipe": "delayed"}}, 1, r"run.recipe: 'delayed' .* keeps a scale .* Take 'folded'"),
        ({"parallel": {"embedding": "rows"}}, 1, r"parallel.embedding: 'rows'"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    configure: Configure, sections: dict[str, Any], shards: int, message: str
) -> None:
    parallel = {"tensor": 2, **sections.pop("parallel", {})}
    with pytest.raises(ConfigError, match=message):
        check_cut(configure(parallel=parallel, **sections), shards)


def test_a_llama_can_be_cut_and_what_is_not_cut_need_not_fit(configure: Configure) -> None:
    check_cut(configure(parallel={"tensor": 2}), 2)
    small = {"states": "fp8-lm", "name": "muon", "gradients": "fp8"}
    check_cut(configure(parallel={"tensor": 2}, run={"weights": "fp8"}, optimizer=small), 2)
    check_cut(configure(model={"architecture": "gpt"}, run={"weights": "fp8"}), 1)
