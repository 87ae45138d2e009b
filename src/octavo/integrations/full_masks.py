"""Attention masks of transformers that mask nothing, left out although the values of a batch are not read.

transformers reads the attention mask of a batch to see that no token is padding, and the positions to see that no
sequences are packed: on a GPU the host waits for both. In compiled code it cannot read, and builds a mask of all pairs
of tokens, with which attention takes several times as long. Both are known without reading where the mask was checked
on the host, in the data loader (`FullMaskDropper`), or where a model gets neither mask nor positions.

What is known travels as a property of the mask, which compiled code sees too: a mask that is one element, expanded over
all tokens, has the strides (0, 0). `mark_full_masks` passes such a mask to the model, and registers an attention of
transformers whose masks are decided by it. Every other mask is the one that transformers builds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "octavo_sdpa"
"""Under which attention and masks are registered: transformers' own, but for masks that are known to be full."""
_OTHERS = ("attention_mask", "position_ids", "past_key_values", "cache", "token_type_ids")
"""Arguments of a model with which a full mask would say more, or less, than none."""


def full_mask(batch: int, sequence: int, device: torch.device) -> Tensor:
    """Return a mask (B, T) of ones for sequences without padding, one element of memory in all."""
    return torch.ones((), dtype=torch.bool, device=device).expand(batch, sequence)


def is_known_to_be_full(mask: Tensor | None) -> bool:
    """Return whether a mask is one of `full_mask`, by its strides alone."""
    return mask is not None and mask.dim() == 2 and not any(mask.stride())


class FullMarks:
    """Hooks that pass full masks to a model. `remove()` takes them off, and the attention with them."""

    def __init__(self, models: Mapping[PreTrainedModel, RemovableHandle]) -> None:
        self._models = dict(models)

    def covers(self, model: nn.Module) -> bool:
        """Return whether no mask is as good as a full one to a model: one of transformers or PEFT, marked inside."""
        base = getattr(model, "get_base_model", lambda: model)()
        return isinstance(base, PreTrainedModel) and any(m in self._models for m in base.modules())

    def remove(self) -> None:
        """Undo `mark_full_masks`."""
        for model, handle in self._models.items():
            handle.remove()
            if model.config._attn_implementation == NAME:
                model.set_attn_implementation("sdpa")
        self._models.clear()


def mark_full_masks(model: nn.Module) -> FullMarks:
    """Have the models of transformers in a model leave out masks that mask nothing, in place.

    Those with no further model inside are changed, which build the masks, if their attention is `sdpa`: no other builds
    masks for what it need not. What a model computes is the same.
    """
    AttentionInterface.register(NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(NAME, _mask)
    marked = [m for m in model.modules() if _builds_masks(m) and m.config._attn_implementation == "sdpa"]
    handles = {m: m.register_forward_pre_hook(_pass_full_mask, with_kwargs=True) for m in marked}
    for each in marked:
        if each.config._attn_implementation == "sdpa":  # several models may share their configuration
            each.set_attn_implementation(NAME)
    return FullMarks(handles)


class FullMaskDropper:
    """A collate function whose batches have no attention mask where it is full, checked on the host.

    Batches with positions keep it: with a mask transformers takes them for positions, without one for packing.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        """Return the batch of these samples."""
        batch = self.collate(samples)
        if isinstance(batch, MutableMapping) and _is_full(batch):
            del batch["attention_mask"]
        return batch


def _is_full(batch: Mapping[str, Any]) -> bool:
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    if not isinstance(mask, Tensor) or not isinstance(ids, Tensor) or mask.is_cuda or mask.shape != ids.shape:
        return False
    return not any(batch.get(name) is not None for name in _OTHERS[1:]) and bool(mask.all())


def _builds_masks(model: nn.Module) -> TypeGuard[PreTrainedModel]:
    if [m for m in model.modules() if isinstance(m, PreTrainedModel)] != [model]:
        return False
    return {"attention_mask", "position_ids"} <= inspect.signature(model.forward).parameters.keys()


def _pass_full_mask(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass a full mask where neither a mask nor positions nor a cache are given. Compiled code traces it."""
    if len(args) > 1 or any(kwargs.get(name) is not None for name in _OTHERS):
        return None
    ids = args[0] if args else kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if ids is None else ids
    if tokens is None or tokens.dim() < 2:
        return None
    return args, {**kwargs, "attention_mask": full_mask(tokens.shape[0], tokens.shape[1], tokens.device)}


def _mask(*, attention_mask: Tensor | None = None, **given: Any) -> Tensor | None:
    """Return transformers' mask for its attention `sdpa`; None, as it does, where a full mask leaves it causal."""
    if is_known_to_be_full(attention_mask):
        if _may_be_left_out(**given):
            return None
        attention_mask = None
    mask: Tensor | None = sdpa_mask(attention_mask=attention_mask, **given)
    return mask


def _may_be_left_out(
    *,
    q_length: int = 0,
    kv_length: int = -1,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> bool:
    """Return whether attention without a mask, causal or over all tokens, is what a model asks for."""
    are_plain = isinstance(q_offset, int) and isinstance(kv_offset, int) and q_offset == kv_offset == 0
    fits = local_size is None or kv_length < local_size
    return (allow_is_causal_skip or allow_is_bidirectional_skip) and q_length == kv_length and are_plain and fits
