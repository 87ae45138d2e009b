from __future__ import annotations

import pytest
import torch

from octavo.errors import ConfigError
from octavo.models.loss import check_length, cross_entropy


def test_the_loss_of_bf16_logits_is_computed_in_fp32() -> None:
    logits_BTV = (4 * torch.randn(2, 5, 300)).bfloat16()
    targets_BT = torch.randint(0, 300, (2, 5))
    exact = -logits_BTV.double().log_softmax(-1).gather(-1, targets_BT[..., None]).mean()
    torch.testing.assert_close(cross_entropy(logits_BTV, targets_BT).double(), exact, rtol=1e-5, atol=1e-5)


def test_length_up_to_the_models_is_accepted() -> None:
    assert check_length(torch.zeros(3, 8), 8) == 8
    with pytest.raises(ConfigError, match=r"model\.sequence"):
        check_length(torch.zeros(3, 9), 8)
