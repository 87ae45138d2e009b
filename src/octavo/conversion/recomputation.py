"""Selective activation recomputation: a block saves results that are expensive to recompute, and recomputes the rest.

The criterion is the price of an operation: the FLOPs needed to recompute one byte of its result. A GEMM that sums over
K takes 2 K FLOPs per element, K per byte in 16 bits. Causal attention over T tokens takes about 2 T per element, T per
byte. Everything else (norms, activations, rotations, quantisation) is bound by memory and almost free.

A block of converted layers has few cheap results left: its layers save codes, and a fused MLP saves no activation. So
the choice is mostly among GEMMs. Results are bitwise the same, whatever is saved.
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

from octavo._util.terminal import quantity
from octavo.conversion.blocks import Wrapped, choose, storages, unwrap, wrap
from octavo.errors import ConfigError

Keep = Literal["products", "nothing"] | float
"""`products`: the results of all GEMMs and of attention; a number: only those whose price is at least that many FLOPs
per byte; `nothing`: only the inputs of the block."""


def recompute(model: nn.Module, keep: Keep = "products", *, blocks: str | Sequence[str] | None = None) -> Recompute:
    """Recompute activations of a model's blocks in backward, in place. The returned object undoes it.

    Convert the model first. Compile afterwards, each block or the whole model.

    Args:
        keep: `products`, `nothing`, or a number of FLOPs per byte. With 5000, a Llama of width 4096 recomputes the
            GEMMs of that width and saves attention over 8192 tokens and the down projection of its MLP.
        blocks: name patterns of the modules; default the children of the `nn.ModuleList` with the most parameters.

    Raises:
        ConfigError: an unknown `keep`, a pattern that matches nothing, or a block that is recomputed already.
    """
    contexts, names = _contexts(_lowest_price(keep)), choose(model, blocks)
    for name in names:
        wrap(model.get_submodule(name), RecomputedBlock, recompute_keeps=str(keep), checkpoint_contexts=contexts)
    return Recompute(model, names, keep)


@dataclass(frozen=True)
class Cost:
    """Memory and recomputation of one block."""

    keep: str
    """`everything` for a block that is not recomputed."""
    bytes: int
    """Bytes saved from forward to backward, each storage once, without parameters."""
    flops: int
    """FLOPs of GEMMs and attention that are recomputed in backward."""
    share: float
    """Their share of the forward's FLOPs."""


@dataclass(frozen=True)
class Recompute:
    """Blocks that are recomputed in backward. `remove()` undoes it."""

    model: nn.Module
    blocks: list[str]
    """Full names."""
    keep: Keep

    def remove(self) -> None:
        """Let the blocks save all activations again."""
        for name in self.blocks:
            unwrap(self.model.get_submodule(name), RecomputedBlock)

    def costs(self, forward: Callable[[], object], others: Sequence[Keep] = ("products", "nothing")) -> list[Cost]:
        """Return the costs of the first block: without recomputation, with it, and with other choices of `keep`.

        Args:
            forward: runs the model on a representative batch; compiled blocks are measured in eager mode.
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
        return f"{quantity(len(self.blocks), 'block')}: {_described(self.keep)} saved, the rest recomputed in backward"


class RecomputedBlock(Wrapped):
    """A checkpointed block."""

    fields = ("recompute_keeps", "checkpoint_contexts")
    recompute_keeps: str
    """The choice as text: Dynamo guards on it, and not on `checkpoint_contexts`."""
    checkpoint_contexts: Callable[[], Any]
    """The choice as `context_fn` of `torch.utils.checkpoint`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the block's result."""
        if not (torch.is_grad_enabled() and self.recompute_keeps):  # read here, so that Dynamo guards on it
            return super().forward(*args, **kwargs)
        # Contexts with "nothing", too: without them PyTorch 2.11 saves all results of autograd.Functions when compiled.
        return checkpoint(self._on_views, *args, use_reentrant=False, context_fn=self.checkpoint_contexts, **kwargs)

    def _on_views(self, *args: Any, **kwargs: Any) -> Any:
        """Return the block's result from views of its inputs.

        Layers that share an input attach results to it: in a checkpoint, Dynamo allows it only for tensors made there.
        """
        args, kwargs = tree_map_only(Tensor, lambda x: x.view_as(x), (args, kwargs))
        return super().forward(*args, **kwargs)


def _contexts(lowest: float) -> Callable[[], Any]:
    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = price(operation, args) >= lowest
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def price(operation: Any, args: tuple[Any, ...]) -> float:
    """Return the FLOPs needed to recompute one byte of an operation's 16-bit result; 0 except for GEMMs and attention.

    Args:
        operation: an operator overload, as dispatch modes receive it.
        args: its arguments.
    """
    length = _LENGTHS.get(getattr(operation, "_schema", None) and operation._schema.name)
    return 0.0 if length is None else float(length(args))


def _summed(position: int) -> Callable[[tuple[Any, ...]], int]:
    """Return a function that gives the number of columns of an argument."""
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
    "octavo::rounded_product": _summed(0),
    **{f"octavo::{name}": lambda args: args[0].shape[-1] for name in ("gemm", "bmm", "grouped_gemm")},
    **{f"aten::_scaled_dot_product_{name}": lambda args: args[1].shape[-2] for name in _ATTENTION},
    "octavo::attention": lambda args: args[1].shape[1],
}
"""Length of the sum behind one element of the result, by operator."""


def _lowest_price(keep: Keep) -> float:
    if keep == "products":
        return 1.0
    if keep == "nothing":
        return float("inf")
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not keep > 0:
        raise ConfigError(
            f"keep = {keep!r}: take 'products', 'nothing', or FLOPs per byte above which a result is saved, such as "
            "5000."
        )
    return float(keep)


def _described(keep: Keep) -> str:
    if isinstance(keep, str):
        return {"products": "products and attention", "nothing": "nothing but their inputs"}[keep]
    return f"results of {keep:,.0f} FLOPs per byte or more"


class _Reached(Exception):
    """Ends a forward pass once the block's arguments are known."""


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
"""Positional and keyword arguments of a block."""


def _run(block: nn.Module, arguments: Arguments) -> object:
    """Run a block's own forward on detached copies of its arguments."""
    args, kwargs = tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), arguments)
    return super(RecomputedBlock, cast(RecomputedBlock, block)).forward(*args, **kwargs)


def _everything(block: nn.Module, arguments: Arguments, own: set[int]) -> Cost:
    kept: dict[int, Tensor] = {}  # holds the tensors too: the address of a freed storage may be reused

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
    """Counts the FLOPs of GEMMs and attention, and holds the results that would be saved."""

    def __init__(self, lowest: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lowest, self.flops, self.again = lowest, 0, 0
        self.kept: dict[int, Tensor] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        cost = price(operation, args)
        if cost:
            made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            flops = int(2 * cost * made[0].numel())
            self.flops += flops
            if cost >= self.lowest:
                self.kept |= {_address(x): x for x in made}
            else:
                self.again += flops
        return result
