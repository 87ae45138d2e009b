"""Attention of packed documents: several in a row of a batch, none of which sees another.

On a GPU the mask is a FlexAttention `BlockMask`: kernels skip blocks of tokens that share no document, so that time
grows with the lengths of documents, not with the square of the row's. Its shapes depend on those of the batch alone and
nothing waits for the device, so that a CUDA graph captures it and compiled code is not compiled again; the arguments of
`torch.nn.attention.varlen`, a number of documents and their greatest length, would do both. Elsewhere the mask is
dense, (B, 1, T, T), the reference.

Shapes: B batch, T tokens, N blocks of `BLOCK` tokens.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.runtime import ledger
from octavo.nn.operands import autocast_dtype

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Mask: TypeAlias = Union[Tensor, "BlockMask"]
"""Bool (B, 1, T, T), True where a query (rows) sees a key; or the same as a `BlockMask`."""
BLOCK = 128
"""Tokens per block, FlexAttention's default. Rows of other lengths have a dense mask."""
_LEAST_HEAD = 16
"""Channels per head that FlexAttention's kernels take."""


def mask_of(document_BT: Tensor, head_dim: int) -> Mask:
    """Return the mask of rows of documents: causal, and within a document only.

    Args:
        document_BT: number of each token's document, not descending along a row.
        head_dim: channels per head of the queries that it is for.
    """
    if document_BT.device.type != "cuda":
        return dense_mask(document_BT)
    against = f"FlexAttention takes no heads of {head_dim} channels" if head_dim < _LEAST_HEAD else ""
    if (length := document_BT.shape[1]) % BLOCK:  # as in decoding, where each length would be compiled
        against = f"{length} tokens are not a multiple of {BLOCK}"
    if not against:
        return block_mask(document_BT)
    if not torch.compiler.is_compiling():
        ledger.fall_back(f"attention of documents has a dense mask: {against}")
    return dense_mask(document_BT)


def dense_mask(document_BT: Tensor) -> Tensor:
    """Return the mask of `mask_of` as bool (B, 1, T, T)."""
    same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    return same_BTT.tril()[:, None]


def block_mask(document_BT: Tensor) -> BlockMask:
    """Return the mask of `mask_of` for FlexAttention, from the first and the last document of each block.

    `create_block_mask` would compute all T x T values first, or compile.
    """
    from torch.nn.attention.flex_attention import BlockMask

    length = document_BT.shape[1]
    blocks_BNX = F.pad(document_BT, (0, -length % BLOCK), value=-1).unflatten(1, (-1, BLOCK))
    first_BN, last_BN = blocks_BNX[..., 0], blocks_BNX.amax(dim=-1)
    number_N = torch.arange(first_BN.shape[1], device=document_BT.device)
    earlier_NN = number_N[:, None] > number_N
    shared_BNN = (last_BN[:, None, :] == first_BN[:, :, None]) & earlier_NN  # the key's last document goes on here
    whole_BNN = shared_BNN & (first_BN[:, None, :] == blocks_BNX[:, :, None, -1])  # one document in both
    part_BNN = (shared_BNN & ~whole_BNN) | (number_N[:, None] == number_N)

    def sees(batch: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_BT[batch, query] == document_BT[batch, key])

    return BlockMask.from_kv_blocks(
        *_listed(part_BNN), *_listed(whole_BNN), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length)
    )


def _listed(blocks_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks of each query block, int32 (B, 1, N), and these first, int32 (B, 1, N, N)."""
    order = torch.argsort(blocks_BNN.int(), dim=-1, descending=True, stable=True)
    return blocks_BNN.sum(dim=-1, dtype=torch.int32)[:, None], order.int()[:, None]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Return the attention (B, H, T, E) of q (B, H, T, E), k and v (B, G, T, E), G dividing H, under a mask."""
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped)
    from torch.nn.attention.flex_attention import flex_attention

    if (dtype := autocast_dtype(q.device.type)) is not None:
        q, k, v = (x.to(dtype) for x in (q, k, v))
    # Without a compiler FlexAttention computes all scores.
    function = _compiled_flex() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
    y: Tensor = function(q, k, v, block_mask=mask, enable_gqa=grouped)
    return y


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
