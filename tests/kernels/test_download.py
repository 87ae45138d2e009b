from __future__ import annotations

import pytest
import torch

from octavo.kernels.download import Download


def test_what_is_on_the_cpu_is_there() -> None:
    x = torch.randn(3, 2)
    coming = Download(x)
    assert coming.has_arrived() and coming.result() is x


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_gpus_tensor_arrives_as_it_was_while_the_gpu_works_on(dtype: torch.dtype) -> None:
    x = torch.arange(6, device="cuda", dtype=dtype).reshape(3, 2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(int(1e9))
        coming = Download(x)
        assert not coming.has_arrived()
        x.add_(1)
        torch.cuda._sleep(int(1e9))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(coming.result(), torch.arange(6, dtype=dtype).reshape(3, 2)) and coming.has_arrived()
    assert not torch.cuda.current_stream().query(), "later work of the GPU is not waited for"
