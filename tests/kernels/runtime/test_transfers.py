"""A table is made once for each thing it says, and no upload waits."""

import pytest
import torch

from octavo.kernels.runtime.transfers import AsyncHostCopy, PinnedStaging, upload

CPU = torch.device("cpu")


def test_a_table_is_made_anew_only_for_another_key():
    uploads, made = PinnedStaging(), []

    def make():
        made.append(1)
        return torch.tensor([len(made)])

    assert uploads("a", (1,), make, CPU) is uploads("a", (1,), make, CPU)
    assert uploads("a", (2,), make, CPU).item() == 2
    assert uploads("b", (2,), make, CPU).item() == 3
    assert len(made) == 3


@pytest.mark.gpu
def test_an_upload_does_not_wait_for_the_gpu():
    tensor = torch.arange(2**20)
    upload(tensor, torch.device("cuda"))  # pins memory
    torch.cuda.synchronize()
    torch.cuda._sleep(2 * 10**9)  # about a second
    there = upload(tensor, torch.device("cuda"))
    assert not torch.cuda.current_stream().query(), "it has waited"
    assert torch.equal(there.cpu(), tensor)


@pytest.mark.gpu
def test_the_same_step_before_each_capture_is_enough() -> None:
    uploads, graphs = PinnedStaging(), []

    def table(value: int) -> torch.Tensor:
        return uploads("a", value, lambda: torch.tensor([value]), torch.device("cuda"))

    for value in (1, 2):
        table(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = table(value)
        graphs.append((value, graph, captured))
    for value, graph, captured in graphs:
        graph.replay()
        assert captured.item() == value


def test_what_is_on_the_cpu_is_there() -> None:
    x = torch.randn(3, 2)
    coming = AsyncHostCopy(x)
    assert coming.has_arrived() and coming.result() is x


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_gpus_tensor_arrives_as_it_was_while_the_gpu_works_on(dtype: torch.dtype) -> None:
    x = torch.arange(6, device="cuda", dtype=dtype).reshape(3, 2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(int(1e9))
        coming = AsyncHostCopy(x)
        assert not coming.has_arrived()
        x.add_(1)
        torch.cuda._sleep(int(1e9))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(coming.result(), torch.arange(6, dtype=dtype).reshape(3, 2)) and coming.has_arrived()
    assert not torch.cuda.current_stream().query(), "later work of the GPU is not waited for"
