"""Head and loss of a causal language model of transformers, computed as one while it trains.

transformers computes the logits of all tokens, in FP32 for the loss, and keeps them for backward. Here the head
computes the loss by chunks of tokens (`octavo.nn.cross_entropy`) and hands it to the model's loss function; the logits
that the model returns in training are empty. In an evaluation or a generation nothing changes.

Whether a model's loss is that of its logits as they are, not capped or scaled, is seen by what it computes: with large
random numbers for the logits of a few tokens, the difference of two losses must be that of two cross-entropies. What a
model adds to the loss, such as that of its router, may stay.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from octavo.conversion.blocks import Wrapped, unwrap, wrap
from octavo.errors import UnsupportedError
from octavo.kernels.runtime.dispatch import PLAIN
from octavo.nn import Linear
from octavo.nn.cross_entropy import IGNORED, linear_cross_entropy
from octavo.nn.modules import has_hooks, hooked

LARGE = 64.0
"""Standard deviation of the random logits: whatever caps or scales logits changes these."""
TOLERANCE = 1e-3
"""Relative error of the difference of two losses, which rounding of what is added to both may cause."""


class Targets(NamedTuple):
    """What the loss of one forward is computed from, besides the head's input."""

    labels: Tensor
    """int64 (B, T), each the target of its position."""
    ignored: int


class _Running(threading.local):
    """The forward that runs in this thread; `nn.DataParallel` has one per replica."""

    targets: Targets | None = None
    """Until the head has read them."""
    total: tuple[Tensor, Tensor] | None = None
    """Sum of the losses and number of targets, until the loss function has read them."""


class HeadLoss:
    """The loss of a model, computed by its head. `remove()` undoes `fuse_head_and_loss`."""

    def __init__(self, model: nn.Module, head: nn.Linear) -> None:
        self.model: Any = model
        self.head = head
        self.running = _Running()
        self._handle: RemovableHandle | None = None

    def install(self) -> None:
        """Put the loss into the head, and its reader in the place of the loss function."""
        wrap(self.head, LossHead, head_loss=self)
        self._handle = self.model.register_forward_pre_hook(_NoteTargets(self), with_kwargs=True)
        self.model.loss_function = _ReadLoss(self)

    def remove(self) -> None:
        """Have the model compute logits and loss as before."""
        if self._handle is not None:
            self._handle.remove()
            unwrap(self.head, LossHead)
            self.model.loss_function = ForCausalLMLoss


def fuse_head_and_loss(model: nn.Module) -> HeadLoss:
    """Compute the loss of a causal language model of transformers by its head, in place; the returned object undoes it.

    Convert the model first. Do not compile it as a whole. Only for loops that do not read the logits in training: they
    are empty.

    Raises:
        UnsupportedError: the model is none of transformers, has a loss or a head of another kind, or changes its logits
            before the loss; it is left as it was.
    """
    if (reason := _refusal(model)) is not None:
        raise UnsupportedError(f"fuse_loss: {reason}. Leave fuse_loss out.")
    fused = HeadLoss(model, _head_of(model))
    fused.install()
    return fused


def recipe_of(head: nn.Module) -> Any:
    """Return the recipe of a linear layer's GEMMs."""
    return head.recipe if isinstance(head, Linear) and head.enabled else "bf16"


class LossHead(Wrapped):
    """A head that computes the loss where there are targets."""

    fields = ("head_loss",)
    head_loss: HeadLoss

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits (..., V); with targets compute the loss, and return (..., 0)."""
        running, weight, bias = self.head_loss.running, cast(Tensor, self.weight), cast(Tensor | None, self.bias)
        targets, running.targets = running.targets, None
        if targets is None or type(weight) not in PLAIN or input.shape[:-1] != targets.labels.shape:
            logits: Tensor = super().forward(input)
            return logits
        labels = targets.labels.to(input.device)
        options: Any = {"bias": bias, "recipe": recipe_of(self), "ignore_index": targets.ignored, "reduction": "sum"}
        total = linear_cross_entropy(input, weight, labels, **options)
        running.total = total, (labels != targets.ignored).sum()
        return input.new_empty((*input.shape[:-1], 0))


class _NoteTargets:
    """Forward pre-hook of the model: takes note of the targets."""

    def __init__(self, fused: HeadLoss | None = None) -> None:
        self.fused = fused

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self.fused is None:
            return
        running = self.fused.running
        running.targets = running.total = None
        labels, ignored = kwargs.get("labels"), kwargs.get("ignore_index", IGNORED)
        if labels is None or not (model.training and torch.is_grad_enabled()):
            return
        shifted = kwargs.get("shift_labels")
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        running.targets = Targets(shifted, ignored)

    def __reduce__(self) -> tuple[Any, ...]:
        return _NoteTargets, ()  # a copy of the model has a head and a loss of its own


class _ReadLoss:
    """Loss function of the model: the loss that its head has computed, if it has."""

    def __init__(self, fused: HeadLoss) -> None:
        self.fused = fused

    def __call__(self, logits: Tensor, labels: Tensor, vocab_size: int, **given: Any) -> Tensor:
        running = self.fused.running
        total, running.total = running.total, None
        if total is None:
            loss: Tensor = ForCausalLMLoss(logits, labels, vocab_size, **given)
            return loss
        items = given.get("num_items_in_batch")
        if items is None:
            return total[0] / total[1]
        return total[0] / (items.to(total[0].device) if isinstance(items, Tensor) else items)

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _usual_loss, ()


def _usual_loss() -> Any:
    return ForCausalLMLoss


def _refusal(model: nn.Module) -> str | None:
    if not isinstance(model, PreTrainedModel) or model.loss_function is not ForCausalLMLoss:
        return f"{type(model).__name__} has not the loss of a causal language model of transformers"
    head = _head_of(model)
    if not isinstance(head, nn.Linear) or has_hooks(head) or isinstance(head, LossHead):
        return f"the head of {type(model).__name__} is no linear layer, or has hooks"
    if type(head.weight) not in PLAIN or head.weight.dim() != 2:
        return "the weight of the head is sharded. Fuse before sharding"
    if isinstance(head, Linear) and head.scaling_slot is not None:
        return "the head has stored scales"
    if _changes_logits(model):
        return f"{type(model).__name__} changes its logits before the loss, by a cap or a scale"
    return None


def _head_of(model: Any) -> Any:
    return model.get_output_embeddings()


def _changes_logits(model: Any) -> bool:
    """Return whether the loss of a few tokens is not the cross-entropy of what the head returns, plus a constant."""
    head: Any = _head_of(model)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(head.weight.shape[0], (2, 8), generator=draw).to(head.weight.device)
    losses, expected = [], []
    modes = {module: module.training for module in model.modules()}
    model.train(False)
    try:
        for _ in range(2):
            logits = LARGE * torch.randn(*ids.shape, len(head.weight), generator=draw, dtype=torch.float32).to(
                head.weight
            )
            with torch.no_grad(), hooked([head.register_forward_hook(lambda *_, z=logits: z)]):
                losses.append(float(model(input_ids=ids, labels=ids, use_cache=False).loss))
            expected.append(float(ForCausalLMLoss(logits, ids, head.weight.shape[0])))
    finally:
        for module, mode in modes.items():
            module.training = mode
    by = expected[1] - expected[0]
    return abs((losses[1] - losses[0]) - by) > TOLERANCE * abs(by)
