"""Tensor and sequence parallel: linear layers cut over ranks, through PyTorch's `parallelize_module`.

A `Parallel` module takes whole features and gives whole features: its first layers are cut by their outputs
(column-parallel), its last ones by their inputs (row-parallel), and what lies between is a rank's own, attention heads
or hidden features (arXiv 1909.08053, section 3). With sequence parallel (arXiv 2205.05198) each rank has some of the
tokens before and after it, so that norms and the residual stream are cut too.

A scale a token belongs to the token. So each rank quantises its own tokens, once, and codes are gathered: the same as
those of one process, bit for bit. A row of a column-parallel weight is whole on a rank, and so are its scale and the
product. Of a row-parallel weight, and of its input, each rank has part of every row, with a scale of its own: equal to
the whole row's or smaller, so that nothing is lost by it, but not the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from octavo.conversion.structure import full_name
from octavo.distributed.tensor_parallel.plan import CutPlan, TensorPlan, target_or_reason
from octavo.distributed.tensor_parallel.tokens import (
    all_tokens,
    copy_in,
    gather_codes,
    gather_values,
    mean_of_tokens,
    own_tokens,
    scatter_sum,
    sum_out,
)
from octavo.distributed.tensor_parallel.weights import (
    ADDED_BY_ALL,
    REPLICATED,
    SAME,
    SUMMED,
    LocalParameters,
    cut,
    place,
)
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels import Target
from octavo.nn import Linear
from octavo.recipes import Recipe

IGNORED = -100
"""The target of a token that does not count in a loss."""


class Parallel(ParallelStyle):
    """A module whose layers are cut over the ranks: an attention, an MLP, or a linear layer by itself.

        plan = {"attention": Parallel(["wq", "wk", "wv"], ["wo"]), "feed_forward": Parallel(["w1", "w3"], ["w2"])}
        parallelize_module(block, mesh, plan)

    The module takes its tokens as its first argument, (B, t, D) on each rank with `sequence`, (B, T, D) without; with
    `rows` it gives the like, as one tensor. Use it after `octavo.convert`; what was fused inside stays fused.

    Args:
        columns: children that are cut by their outputs; "" is the module itself. They read the module's first argument.
        rows: children that are cut by their inputs; their sum over the ranks is what the module returns.
        sequence: whether each rank has some of the tokens outside of the module. Codes are then gathered, where the
            recipe allows it (`octavo.distributed.tensor_parallel.plan`), and sums are scattered.

    Raises:
        UnsupportedError: a layer that cannot be cut, or whose recipe keeps scales from step to step.
    """

    def __init__(self, columns: Sequence[str] = (), rows: Sequence[str] = (), *, sequence: bool = True) -> None:
        super().__init__()
        self.columns, self.rows, self.sequence = tuple(columns), tuple(rows), sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layers = {name: module.get_submodule(name) for name in (*self.columns, *self.rows)}
        for name, layer in layers.items():
            _check_recipe(layer, name or type(module).__name__)
        for name, layer in layers.items():
            cut(layer, name or type(module).__name__, device_mesh, 0 if name in self.columns else 1)
        LocalParameters(module, [(layer, ADDED_BY_ALL) for layer in layers.values()], device_mesh)
        group, columns = device_mesh.get_group(), [layers[name] for name in self.columns]
        if self.sequence and columns and _target_now(columns) is not None:
            for layer in columns:
                layer.reads_codes = True  # type: ignore[assignment]
        if columns:
            module.register_forward_pre_hook(lambda _, args: (self._take(args, columns, group), *args[1:]))
        if self.rows:
            module.register_forward_hook(lambda _, args, result: self._give(result, group))
        return module

    def _take(self, args: tuple[Any, ...], columns: Sequence[nn.Module], group: dist.ProcessGroup) -> Tensor:
        if not args or not isinstance(args[0], Tensor):
            raise UnsupportedError(
                "tensor parallel: a module must be given its tokens as its first argument, a tensor."
            )
        target = _target_now(columns)
        if not self.sequence:
            return copy_in(args[0], target, group)
        return gather_values(args[0], group) if target is None else gather_codes(args[0], target, group)

    def _give(self, result: Any, group: dist.ProcessGroup) -> Tensor:
        if not isinstance(result, Tensor):
            raise UnsupportedError(
                f"tensor parallel: a module whose layers are cut by rows gave {type(result).__name__}: only a tensor "
                "can be summed over the ranks."
            )
        return scatter_sum(result, group) if self.sequence else sum_out(result, group)


class ColumnParallel(Parallel):
    """A linear layer that is cut by its outputs: it gives this rank's, of all tokens."""

    def __init__(self, *, sequence: bool = True) -> None:
        super().__init__([""], sequence=sequence)


class RowParallel(Parallel):
    """A linear layer that is cut by its inputs: it takes this rank's, of all tokens."""

    def __init__(self, *, sequence: bool = True) -> None:
        super().__init__(rows=[""], sequence=sequence)


class Replicated(ParallelStyle):
    """A module whose parameters all ranks have, as a norm or a router.

    Args:
        sequence: whether each rank gives it tokens of its own; gradients are then summed over the ranks.
    """

    def __init__(self, *, sequence: bool = True) -> None:
        super().__init__()
        self.sequence = sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        inside = list(module.modules())
        for one in inside:
            for name in one._parameters:
                place(one, name, device_mesh, REPLICATED)
        gradient = SUMMED if self.sequence else SAME
        LocalParameters(module, [(one, gradient) for one in inside if one._parameters], device_mesh)
        return module


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = True) -> TensorPlan:
    """Cut an `octavo.models.llama.Llama`, or a model built as it is, over the ranks of a mesh, in place.

    Attention and feed-forward of each block are cut. With `sequence` the residual stream, the norms, the head and its
    loss are cut by tokens: the embedding and the head are whole on each rank, and their gradients are summed. Every
    rank calls the model with the same whole tokens and targets, and gets the same loss, or all logits.

    The order is: convert, `tensor_parallel`, `shard` over another dimension of the mesh, optimizer. Every rank has the
    same weights before.

    Args:
        mesh: of one dimension; of a larger one that of tensor parallel, `mesh["tensor"]`.
        sequence: whether tokens are cut outside of attention and feed-forward.

    Returns:
        What each layer is cut by, and what is sent for it.

    Raises:
        ConfigError: the model is built in another way, or the ranks do not divide its heads.
        UnsupportedError: a layer that cannot be cut; a recipe that keeps scales.
    """
    blocks = _blocks(model, mesh, sequence)
    styles = {
        "attention_norm": Replicated(sequence=sequence),
        "attention": Parallel(["wq", "wk", "wv"], ["wo"], sequence=sequence),
        "ffn_norm": Replicated(sequence=sequence),
        "feed_forward": Parallel(["w1", "w3"], ["w2"], sequence=sequence),
    }
    for block in blocks.values():  # all are looked at before one is changed
        for name, style in styles.items():
            for layer in (*style.columns, *style.rows) if isinstance(style, Parallel) else ():
                _check_recipe(block.get_submodule(full_name(name, layer)), full_name(name, layer))
    rows = [
        _row(block.get_submodule(full_name(part, layer)), full_name(prefix, full_name(part, layer)), style, layer)
        for prefix, block in blocks.items()
        for part, style in styles.items()
        if isinstance(style, Parallel)
        for layer in (*style.columns, *style.rows)
    ]
    for block in blocks.values():
        parallelize_module(block, mesh, styles)
    _place_ends(model, mesh, sequence)
    return TensorPlan(ranks=mesh.size(), sequence=sequence, layers=tuple(rows))


_ENDS = ("tok_embeddings", "norm", "lm_head")
_PARTS = {"attention": ("wq", "wk", "wv", "wo"), "feed_forward": ("w1", "w2", "w3")}


def _blocks(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> dict[str, nn.Module]:
    if mesh.ndim != 1:
        raise ConfigError(
            f"tensor_parallel: a mesh of {mesh.ndim} dimensions. Give the one to cut over, as mesh['tensor']."
        )
    wanted = [f"{part}.{layer}" for part, layers in _PARTS.items() for layer in layers]
    blocks = dict(getattr(model, "layers", nn.ModuleList()).named_children())
    missing = [f"layers.{n}.{name}" for n, block in blocks.items() for name in wanted if not _has(block, name)]
    if missing or not blocks:
        raise ConfigError(
            f"tensor_parallel: {type(model).__name__} has no {missing[0] if missing else 'layers'}: it cuts models "
            "built as octavo.models.llama. Give parallelize_module a plan of octavo.distributed.Parallel for others."
        )
    if sequence and not all(_has(model, name, nn.Module) for name in _ENDS):
        raise UnsupportedError(
            f"tensor_parallel: {type(model).__name__} is a part of a model, without {' or '.join(_ENDS)}: its tokens "
            "come whole. Take sequence=False."
        )
    for name, block in blocks.items():
        attention = block.get_submodule("attention")
        heads = [attention.get_submodule(x).out_features // attention.head_dim for x in ("wq", "wk")]
        if any(count % mesh.size() for count in heads):
            raise ConfigError(
                f"tensor_parallel: layers.{name}.attention has {heads[0]} heads and {heads[1]} of keys and values: "
                f"{mesh.size()} ranks cannot share them. Take a number of ranks that divides both."
            )
    return {f"layers.{name}": block for name, block in blocks.items()}


def _has(module: nn.Module, name: str, kind: type[nn.Module] = nn.Linear) -> bool:
    try:
        return isinstance(module.get_submodule(name), kind)
    except AttributeError:
        return False


def _place_ends(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    """Make embedding, last norm and head whole on each rank, and cut the tokens between them.

    A stage of a pipeline has some of them only. The head is read by the model itself, for its loss, and is not called.
    """
    ends = [getattr(model, name) for name in _ENDS if getattr(model, name, None) is not None]
    shared: dict[Any, Any] = {}
    for end in ends:
        before = end._parameters["weight"]
        if before in shared:  # an embedding that is the head too
            end._parameters["weight"] = shared[before]
        else:
            place(end, "weight", mesh, REPLICATED)
            shared[before] = end._parameters["weight"]
    LocalParameters(model, [(end, SUMMED if sequence else SAME) for end in ends], mesh)
    if not sequence:
        return
    group = mesh.get_group()
    targets: list[Tensor | None] = []
    model.get_submodule("tok_embeddings").register_forward_pre_hook(lambda _, args: own_tokens(args[0], group))

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[1] if len(args) > 1 else kwargs.get("targets_BT")
        targets[:] = [None if given is None else own_tokens(given, group)]
        if len(args) > 1:
            return (args[0], targets[0], *args[2:]), kwargs
        return args, kwargs if given is None else {**kwargs, "targets_BT": targets[0]}

    def leave(_: nn.Module, args: Any, result: Tensor) -> Tensor:
        if targets[0] is None:
            return all_tokens(result, group)
        counted = targets[0].ne(IGNORED)
        return mean_of_tokens(result, counted.sum() if result.dim() == 0 else counted.sum(1), group)

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(leave)


def _row(layer: nn.Module, name: str, style: Parallel, attribute: str) -> CutPlan:
    assert isinstance(layer, nn.Linear)
    by_columns = attribute in style.columns
    sent = target_or_reason(layer) if by_columns and style.sequence else ""
    return CutPlan(
        name=name,
        shape=(layer.out_features, layer.in_features),
        cut="columns" if by_columns else "rows",
        sent=f"{sent.format} {sent.granularity}" if isinstance(sent, Target) else "bfloat16",
        reason=sent if isinstance(sent, str) else "",
    )


def _target_now(columns: Sequence[nn.Module]) -> Target | None:
    """Return what layers read their input as, if codes are all that they read of it now; else None."""
    if any(isinstance(layer, Linear) and not layer.enabled for layer in columns):
        return None
    found = {target_or_reason(layer) for layer in columns}
    one = found.pop() if len(found) == 1 else None
    return one if isinstance(one, Target) else None


def _check_recipe(layer: nn.Module, name: str) -> None:
    recipe: Recipe | None = layer.recipe if isinstance(layer, Linear) else None
    if recipe is not None and recipe.keeps_scales:
        raise UnsupportedError(
            f"tensor parallel: {name}: recipe '{recipe.name}' keeps a scale of whole tensors from step to step, and a "
            "rank has parts. Take 'folded', 'rowwise', 'block' or 'tensorwise'."
        )
