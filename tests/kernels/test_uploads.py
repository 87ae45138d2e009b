"""A table is made once for each thing it says."""

import torch

from octavo.kernels.uploads import Uploads

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
