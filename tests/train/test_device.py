from __future__ import annotations

import pytest
import torch

from octavo.errors import ConfigError
from octavo.train.device import describe, resolve, versions


def test_names() -> None:
    assert resolve("cpu") == torch.device("cpu")
    assert resolve("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert describe(torch.device("cpu"))
    assert {"octavo", "python", "torch"} <= versions().keys()


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "", "cuda:99"])
def test_devices_that_are_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.device"):
        resolve(name)
