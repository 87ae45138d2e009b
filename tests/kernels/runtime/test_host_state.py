"""The switches of a process: set in a block, restored after it, and read by every cache and guard."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import kernels
from octavo.kernels import sample
from octavo.kernels.runtime import dispatch, host_state, ledger
from octavo.kernels.runtime.host_state import HostState, switched
from octavo.kernels.runtime.operation import operation

BLOCKS = {
    "accumulator": lambda: kernels.gemm_by("exact"),
    "ledgers": kernels.record,
    "planning": lambda: dispatch.planning_for("h200"),
    "fake": dispatch.fake_mode,
    "warming_up": sample.warm_up,
    "held_warnings": ledger.hold_warnings,
}


@pytest.mark.parametrize("field", BLOCKS)
def test_a_block_sets_its_switch_alone_and_restores_it(field: str) -> None:
    before = host_state.now
    assert before == HostState()
    with pytest.raises(ZeroDivisionError), BLOCKS[field]():
        changed = {name for name in HostState._fields if getattr(host_state.now, name) != getattr(before, name)}
        assert changed - {"is_open_to_compilers"} == {field}
        assert host_state.now.is_open_to_compilers == (field not in ("accumulator", "ledgers"))
        with BLOCKS[field]():
            pass
        assert getattr(host_state.now, field) != getattr(before, field)
        _ = 1 / 0
    assert host_state.now == before


def test_blocks_that_overlap_each_restore_their_own_switch() -> None:
    """As those of two threads do."""
    first, second = ExitStack(), ExitStack()
    outer = first.enter_context(kernels.record())
    first.enter_context(kernels.gemm_by("exact"))
    inner = second.enter_context(kernels.record())
    second.enter_context(dispatch.planning_for("h200"))
    first.close()
    assert host_state.now == HostState(ledgers=(inner,), planning="h200", is_open_to_compilers=False)
    ledger.count("a")
    second.close()
    assert host_state.now == HostState() and inner.gemms == {"a": 1} and not outer.gemms


def test_no_block_of_several_threads_is_lost() -> None:
    def open_one(number: int) -> None:
        for _ in range(200):
            with kernels.record() as counted:
                ledger.count(f"{number}")
            assert counted.gemms[f"{number}"] == 1

    with kernels.record() as every, ThreadPoolExecutor(4) as pool:
        list(pool.map(open_one, range(4)))
    assert host_state.now == HostState() and every.gemms == {f"{number}": 200 for number in range(4)}


def test_backward_in_another_thread_sees_the_switches() -> None:
    with switched(accumulator="exact"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: host_state.now).result().accumulator == "exact"


@operation(fake=torch.empty_like, in_graph=lambda x: True)
def accumulator_toy(x: Tensor) -> Tensor:
    return x * (3 if host_state.now.accumulator else 2)


def test_compiled_code_that_launches_kernels_itself_gives_way_to_an_accumulator() -> None:
    """On a GPU it calls `torch._scaled_mm`, which no accumulator reaches."""
    torch._dynamo.reset()
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        graphs.append(graph.code)
        return graph

    compiled = torch.compile(lambda x: accumulator_toy(x), backend=aot_autograd(fw_compiler=backend))
    x = torch.ones(2)
    for name in ("", "exact", "hopper", "", "slow"):
        with switched(accumulator=name):
            assert compiled(x).tolist() == ([3, 3] if name else [2, 2])
    assert ["octavo.accumulator_toy" in graph for graph in graphs] == [False, True]  # one graph for all accumulators
    torch._dynamo.reset()


def test_the_graph_itself_says_whether_compilers_may_look_inside() -> None:
    """PyTorch caches what becomes of a graph, on disk too, by the graph: not by what a switch says."""
    torch._dynamo.reset()
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        graphs.append(graph.code)
        return graph

    compiled = torch.compile(lambda x: accumulator_toy(x), backend=backend)
    for block in (nullcontext, kernels.record, lambda: kernels.gemm_by("exact"), nullcontext):
        with block():
            compiled(torch.ones(2))
    assert len({*graphs}) == len(graphs) == 2
    torch._dynamo.reset()


def test_what_a_cache_keeps_for_a_planned_gpu_is_not_taken_for_the_present_one() -> None:
    device = torch.device("cuda", 0)
    with dispatch.planning_for("h200"):
        planned = dispatch.triton_unsupported_reason(device)
    with dispatch.planning_for("a100"):
        assert dispatch.triton_unsupported_reason(device) != planned
    with dispatch.planning_for("h200"):
        assert dispatch.triton_unsupported_reason(device) == planned
