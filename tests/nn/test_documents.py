from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask

from octavo.kernels.runtime import ledger
from octavo.nn.documents import attend, block_mask, dense_mask, mask_of

LISTS = ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks")


def rows(length: int, share: float, seed: int = 0) -> Tensor:
    """Numbers of documents, (3, length), the first row one document."""
    starts_BT = torch.rand(3, length, generator=torch.Generator().manual_seed(seed)) < share
    starts_BT[0] = False
    return starts_BT.cumsum(1)


@pytest.mark.parametrize("length", [128, 300, 512])
@pytest.mark.parametrize("share", [0.004, 0.02, 0.5])
def test_the_blocks_are_those_that_pytorch_finds_by_all_values(length: int, share: float) -> None:
    document_BT = rows(length, share)
    mask = block_mask(document_BT)
    expected = create_block_mask(mask.mask_mod, 3, 1, length, length, device="cpu")
    assert mask.shape == expected.shape
    for name in LISTS:
        count = getattr(expected, name)
        assert torch.equal(getattr(mask, name), count)
        listed = name.replace("num_blocks", "indices")
        ours, theirs = getattr(mask, listed), getattr(expected, listed)
        is_listed = torch.arange(ours.shape[-1]) < count[..., None]
        # Which blocks, in whatever order.
        sorts = [torch.where(is_listed, x, x.shape[-1]).sort(dim=-1).values for x in (ours, theirs)]
        assert torch.equal(*sorts)


def test_both_masks_give_one_result_and_compiled_code_is_compiled_once() -> None:
    counter = CompileCounter()
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    q, k, v = torch.randn(3, 4, 300, 16), torch.randn(3, 2, 300, 16), torch.randn(3, 2, 300, 16)
    for seed in range(3):
        document_BT = rows(300, 0.02 * (seed + 1), seed)
        expected = attend(q, k, v, dense_mask(document_BT))
        torch.testing.assert_close(compiled(q, k, v, block_mask(document_BT)), expected, rtol=2e-5, atol=2e-6)
    assert counter.frame_count == 1


def test_the_dense_mask_is_causal_and_within_documents() -> None:
    mask_TT = dense_mask(torch.tensor([[1, 1, 2, 3, 3, 3]]))[0, 0]
    seen = [[j for j in range(6) if mask_TT[i, j]] for i in range(6)]
    assert seen == [[0], [0, 1], [2], [3], [3, 4], [3, 4, 5]]


def test_the_cpu_has_the_reference() -> None:
    assert isinstance(mask_of(rows(128, 0.5), 16), Tensor)


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "head_dim"), [(128, 8), (130, 64)])
def test_what_flex_attention_does_not_take_has_a_dense_mask_aloud(length: int, head_dim: int) -> None:
    with ledger.record() as seen:
        assert isinstance(mask_of(rows(length, 0.5).cuda(), head_dim), Tensor)
    assert any("has a dense mask" in text for text in seen.fallbacks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_on_a_gpu_are_those_of_the_dense_mask(dtype: torch.dtype) -> None:
    document_BT = rows(768, 0.01).cuda()
    inputs = [torch.randn(3, heads, 768, 64, device="cuda", dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    dy = torch.randn(3, 4, 768, 64, device="cuda", dtype=dtype)
    results = []
    for mask in (mask_of(document_BT, 64), dense_mask(document_BT)):
        y = attend(*inputs, mask)
        results.append([y, *torch.autograd.grad(y, inputs, dy)])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 5e-3  # TF32
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)
