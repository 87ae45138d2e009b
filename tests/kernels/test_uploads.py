"""A table is made once for each thing it says, and no upload waits."""

import time

import pytest
import torch

from octavo.kernels.uploads import Uploads, upload

CPU = torch.device("cpu")


def test_a_table_is_made_anew_only_for_another_key():
    uploads, made = Uploads(), []

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
    began = time.perf_counter()
    there = upload(tensor, torch.device("cuda"))
    assert time.perf_counter() - began < 0.3
    assert torch.equal(there.cpu(), tensor)
