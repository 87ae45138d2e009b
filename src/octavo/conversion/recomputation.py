"""Selective recomputation: a block keeps what costs much to compute again, and computes the rest anew in backward.

How much an operation is worth keeping is its price: FLOPs to compute a byte of its result again. A product that sums
over K has 2 K FLOPs an element, K a byte in 16 bits. Causal attention over T tokens has about 2 T an element, T a byte.
Everything else (norms, activations, rotations, quantising) reads and writes memory and costs next to nothing.

A block of converted layers has few such cheap results left: its layers keep codes, and a fused MLP keeps no activation.
So the choice is mostly among products. Results are the same to the bit, whatever is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from octavo.conversion.blocks import Wrapped, choose, storages, unwrap, wrap
from octavo.errors import ConfigError

Keep = Literal["products", "nothing"] | float
"""`products`: the results of all GEMMs and of attention; a number: of those alone that cost at least so many FLOPs a
byte; `nothing`: only what goes into the block."""


def recompute(model: nn.Module, keep: Keep = "products", *, blocks: str | Sequence[str] | None = None) -> Recompute:
    """Let a model's blocks compute again in backward what they do not keep. In place; returns what can undo it.

    Convert the model first. Compile after it, each block or the whole model. It switches on
    `torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint`, which compiled blocks need.

    Args:
        keep: `products`, `nothing`, or a number of FLOPs a byte. With 5000, a Llama of width 4096 computes the products
            of that width again and keeps attention over 8192 tokens and the last product of its MLP.
        blocks: name patterns of the modules; default the children of the `nn.ModuleList` with the most parameters.

    Raises:
        ConfigError: an unknown `keep`, a pattern that matches nothing, or a block that is recomputed already.
    """
    contexts, names = _contexts(_lowest_price(keep)), choose(model, blocks)
    for name in names:
        wrap(model.get_submodule(name), RecomputedBlock, recompute_keeps=str(keep), checkpoint_contexts=contexts)
    # Layers that share an input hand each other results while a block runs, which leaves nothing behind.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    return Recompute(model, names, keep)


@dataclass(frozen=True)
class Cost:
    """What a block keeps, and what it computes again."""

    keep: str
    """`everything` for a block that is not recomputed."""
    bytes: int
    """Kept from forward to backward, each storage once, without parameters."""
    flops: int
    """Of products and attention that are computed again in backward."""
    share: float
    """Those, as a share of the forward's."""


@dataclass(frozen=True)
class Recompute:
    """Blocks that compute again in backward. `remove()` undoes it."""

    model: nn.Module
    blocks: list[str]
    """Their full names."""
    keep: Keep

    def remove(self) -> None:
        """Let the blocks keep everything again."""
        for name in self.blocks:
            unwrap(self.model.get_submodule(name), RecomputedBlock)

    def costs(self, forward: Callable[[], object], others: Sequence[Keep] = ("products", "nothing")) -> list[Cost]:
        """Return what the first block costs: without this, with it, and by other choices.

        Args:
            forward: runs the model on a batch of the size in question; compiled blocks are measured as eager ones.
            others: further choices to compare.

        Raises:
            ConfigError: `forward` did not call the block.
        """
        block = self.model.get_submodule(self.blocks[0])
        arguments = _arguments_of(block, forward)
        choices = dict.fromkeys([self.keep, *others])
        own = storages(self.model.modules())
        return [_everything(block, arguments, own), *(_cost(block, arguments, own, keep) for keep in choices)]

    def __str__(self) -> str:
        return f"{len(self.blocks)} blocks keep {_described(self.keep)}, and compute the rest again in backward"


class RecomputedBlock(Wrapped):
    """A block that is checkpointed."""

    recompute_keeps: str
    """What is kept, in words: compiled code is made anew where it reads others, and not where `contexts` differ."""
    checkpoint_contexts: Callable[[], Any]
    """The same as `torch.utils.checkpoint` wants to be told it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the block returns."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        if self.recompute_keeps == "nothing":
            return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, context_fn=self.checkpoint_contexts, **kwargs)


def _contexts(lowest: float) -> Callable[[], Any]:
    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = price(operation, args) >= lowest
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def price(operation: Any, args: tuple[Any, ...]) -> float:
    """Return the FLOPs to compute a byte of an operation's 16-bit result again; 0 for all but products and attention.

    Args:
        operation: an overload, as dispatch modes see it.
        args: its arguments.
    """
    length = _LENGTHS.get(getattr(operation, "_schema", None) and operation._schema.name)
    return 0.0 if length is None else float(length(args))


def _summed(position: int) -> Callable[[tuple[Any, ...]], int]:
    """The columns of an argument."""
    return lambda args: int(args[position].shape[-1])


def _taps(args: tuple[Any, ...]) -> int:
    weight: Tensor = args[1]
    return weight.numel() // max(weight.shape[0], 1)


_ATTENTION = ("flash_attention", "cudnn_attention", "efficient_attention", "flash_attention_for_cpu")
_LENGTHS: dict[str | None, Callable[[tuple[Any, ...]], int]] = {
    **{f"aten::{name}": _summed(0) for name in ("mm", "bmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")},
    "aten::addmm": _summed(1),
    "aten::baddbmm": _summed(1),
    "aten::convolution": _taps,
    **{f"octavo::{name}": _summed(0) for name in ("fprop", "gemm", "bmm", "grouped_fprop", "grouped_gemm")},
    **{f"aten::_scaled_dot_product_{name}": lambda args: args[1].shape[-2] for name in _ATTENTION},
    "octavo::attention": lambda args: args[1].shape[1],
}
"""How long the sum behind an element of a result is, by operator."""


def _lowest_price(keep: Keep) -> float:
    if keep == "products":
        return 1.0
    if keep == "nothing":
        return float("inf")
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not keep > 0:
        raise ConfigError(
            f"keep = {keep!r}: it is 'products', 'nothing', or FLOPs a byte above which a result is kept, such as 5000."
        )
    return float(keep)


def _described(keep: Keep) -> str:
    if isinstance(keep, str):
        return {"products": "products and attention", "nothing": "nothing but their inputs"}[keep]
    return f"what costs {keep:,.0f} FLOPs a byte or more"


class _Reached(Exception):
    """Ends a forward where all that is wanted of it is known."""


def _arguments_of(block: nn.Module, forward: Callable[[], object]) -> Arguments:
    seen: list[Arguments] = []

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, kwargs))
        raise _Reached

    handle = block.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        forward()
    except _Reached:
        return seen[0]
    finally:
        handle.remove()
    raise ConfigError("costs: the forward that was given did not call the block. Give one that runs the model.")


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a block is called with."""


def _run(block: nn.Module, arguments: Arguments) -> object:
    """Run a block's own forward on what it is called with, cut off from what made that."""
    args, kwargs = tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), arguments)
    return super(RecomputedBlock, cast(RecomputedBlock, block)).forward(*args, **kwargs)


def _everything(block: nn.Module, arguments: Arguments, own: set[int]) -> Cost:
    kept: dict[int, Tensor] = {}  # the tensors too: an address means nothing once its storage is gone

    def pack(x: Tensor) -> Tensor:
        kept[_address(x)] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        _run(block, arguments)
    return Cost("everything", _bytes(kept, own), 0, 0.0)


def _cost(block: nn.Module, arguments: Arguments, own: set[int], keep: Keep) -> Cost:
    tally = _Tally(_lowest_price(keep))
    inputs = {_address(x): x for x in tree_leaves(arguments) if isinstance(x, Tensor)}
    with tally:
        _run(block, arguments)
    share = tally.again / tally.flops if tally.flops else 0.0
    return Cost(str(keep), _bytes(inputs | tally.kept, own), tally.again, share)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _bytes(kept: dict[int, Tensor], own: set[int]) -> int:
    return sum(x.untyped_storage().nbytes() for address, x in kept.items() if address not in own)


class _Tally(TorchDispatchMode):
    """Counts the FLOPs of products and attention, and holds the results that would be kept."""

    def __init__(self, lowest: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lowest, self.flops, self.again = lowest, 0, 0
        self.kept: dict[int, Tensor] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        cost = price(operation, args)
        if cost:
            made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            principal = made if operation._schema.name == "octavo::fprop" else made[:1]
            flops = int(2 * cost * sum(x.numel() for x in principal))
            self.flops += flops
            if cost >= self.lowest:
                self.kept |= {_address(x): x for x in made}
            else:
                self.again += flops
        return result
