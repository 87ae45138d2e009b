"""Tensor and sequence parallel linear layers, through PyTorch's `parallelize_module`.

A `Parallel` module takes and returns all features: its first layers are column-parallel (sharded by outputs), its last
ones row-parallel (sharded by inputs), and in between each rank computes some attention heads or hidden features (arXiv
1909.08053, section 3). With sequence parallel (arXiv 2205.05198) tokens are sharded before and after the module, and so
are norms and the residual stream.

With one scale per token, each rank quantises its own tokens once, and the gathered codes are bitwise those of one
process. Rows of a column-parallel weight are whole on a rank, and so are their scales and products. For a row-parallel
weight and its input, each rank has part of every row, with its own scale: at most that of the whole row, so that no
precision is lost, but the bits differ. A rotation takes the largest blocks that divide a rank's part of a row, which
may be smaller than those of the whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from octavo.distributed.plans import LayerPlan, TensorParallelPlan, input_codes_or_reason
from octavo.distributed.tensor_parallel.tokens import (
    all_gather_codes,
    all_gather_replicated,
    all_gather_values,
    copy_to_region,
    local_tokens,
    mean_of_tokens,
    reduce_from_region,
    reduce_scatter_tokens,
)
from octavo.distributed.tensor_parallel.weights import (
    ADDED_BY_ALL,
    SAME,
    SUMMED,
    LocalParameters,
    Placed,
    all_replicated,
    check_placements,
    distribute,
    placements_of,
)
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels import QuantSpec
from octavo.nn.cross_entropy import IGNORED
from octavo.nn.linear import LinearLayer
from octavo.nn.modules import full_name
from octavo.numerics import SMALLEST_ROTATION, block_for, is_rotatable
from octavo.numerics.rotation import largest_block


class Parallel(ParallelStyle):
    """Tensor-parallel style of a module: an attention, an MLP, or a single linear layer.

        plan = {"attention": Parallel(["wq", "wk", "wv"], ["wo"]), "feed_forward": Parallel(["w1", "w3"], ["w2"])}
        parallelize_module(block, mesh, plan)

    The first argument of the module is its tokens, (B, t, D) on each rank with `sequence`, else (B, T, D); with `rows`
    its result has the same form, as one tensor. Use it after `octavo.convert`; fused layers stay fused. Parameters of
    other modules inside, such as norms of heads, are replicated; their gradients, each of a part, are summed.

    Args:
        columns: column-parallel children; "" is the module itself. They read the module's first argument.
        rows: row-parallel children; the module returns their sum over the ranks.
        sequence: sequence parallel: tokens are sharded outside of the module. Codes are then gathered, where the recipe
            allows it (`octavo.distributed.plans`), and sums are scattered.

    Raises:
        UnsupportedError: a layer that cannot be sharded, or a recipe with stored scales.
    """

    def __init__(self, columns: Sequence[str] = (), rows: Sequence[str] = (), *, sequence: bool = True) -> None:
        super().__init__()
        self.columns, self.rows, self.sequence = tuple(columns), tuple(rows), sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(self.placements(module, device_mesh.size()), device_mesh)
        LocalParameters(module, self.gradient_kinds(module), device_mesh)
        group, columns = device_mesh.get_group(), [module.get_submodule(name) for name in self.columns]
        if self.sequence and columns and _target_now(columns) is not None:
            for layer in columns:
                layer.reads_codes = True  # type: ignore[assignment]
        if columns:
            module.register_forward_pre_hook(lambda _, args: (self._gather_input(args, columns, group), *args[1:]))
        if self.rows:
            rows = [module.get_submodule(name) for name in self.rows]
            module.register_forward_hook(lambda _, args, result: self._reduce_output(result, rows, group))
        return module

    def placements(self, module: nn.Module, ranks: int, where: str = "") -> list[Placed]:
        """Return the placements of all parameters inside.

        Args:
            where: name of the module, for error messages.

        Raises:
            UnsupportedError: a layer that cannot be sharded, or a recipe that cannot (`_check_recipe`).
        """
        found = []
        for name in (*self.columns, *self.rows):
            layer, known = module.get_submodule(name), full_name(where, name) or type(module).__name__
            _check_recipe(layer, known, 1 if name in self.columns else ranks)
            found += placements_of(layer, known, ranks, 0 if name in self.columns else 1)
        others = (one for one, kind in self.gradient_kinds(module) if kind == SUMMED)
        return [*found, *(placed for one in others for placed in all_replicated(one))]

    def gradient_kinds(self, module: nn.Module) -> list[tuple[nn.Module, str]]:
        """Return the modules inside that have parameters, and the kind of gradient of those that are replicated."""
        layers = [module.get_submodule(name) for name in (*self.columns, *self.rows)]
        return [(one, ADDED_BY_ALL if one in layers else SUMMED) for one in module.modules() if one._parameters]

    def _gather_input(self, args: tuple[Any, ...], columns: Sequence[nn.Module], group: dist.ProcessGroup) -> Tensor:
        if not args or not isinstance(args[0], Tensor):
            raise UnsupportedError("tensor parallel: the first argument of a module must be its tokens, a tensor.")
        if not self.sequence:
            return copy_to_region(args[0], group)
        target = _target_now(columns)
        return all_gather_values(args[0], group) if target is None else all_gather_codes(args[0], target, group)

    def _reduce_output(self, result: Any, rows: Sequence[nn.Module], group: dist.ProcessGroup) -> Tensor:
        if not isinstance(result, Tensor):
            raise UnsupportedError(
                f"tensor parallel: a module with row-parallel layers returned {type(result).__name__}: only a tensor "
                "can be summed over the ranks."
            )
        if not self.sequence:
            return reduce_from_region(result, group)
        return reduce_scatter_tokens(result, group, codes=all(map(_rounds_gradient, rows)))


class ColumnParallel(Parallel):
    """Style of a linear layer sharded by outputs: it returns this rank's outputs of all tokens."""

    def __init__(self, *, sequence: bool = True) -> None:
        super().__init__([""], sequence=sequence)


class RowParallel(Parallel):
    """Style of a linear layer sharded by inputs: it takes this rank's inputs of all tokens."""

    def __init__(self, *, sequence: bool = True) -> None:
        super().__init__(rows=[""], sequence=sequence)


class Replicated(ParallelStyle):
    """Style of a module with replicated parameters, such as a norm or a router.

    Args:
        sequence: each rank has its own tokens, and gradients are summed over the ranks.
    """

    def __init__(self, *, sequence: bool = True) -> None:
        super().__init__()
        self.sequence = sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(self.placements(module, device_mesh.size()), device_mesh)
        LocalParameters(module, self.gradient_kinds(module), device_mesh)
        return module

    def placements(self, module: nn.Module, ranks: int, where: str = "") -> list[Placed]:
        """Return the placements of all parameters inside, see `Parallel.placements`."""
        return [placed for one, _ in self.gradient_kinds(module) for placed in all_replicated(one)]

    def gradient_kinds(self, module: nn.Module) -> list[tuple[nn.Module, str]]:
        """Return the modules inside that have parameters, and the kind of their gradients."""
        return [(one, SUMMED if self.sequence else SAME) for one in module.modules() if one._parameters]


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = True) -> TensorParallelPlan:
    """Shard the layers of an `octavo.lab.models.llama.Llama`, or a model of that structure, over a mesh, in place.

    Attention and feed-forward of each block are sharded. With `sequence`, the residual stream, the norms, the head and
    its loss are sharded by tokens: embedding and head are replicated, and their gradients are summed. Every rank calls
    the model with the same whole tokens and targets, and gets the same loss, or all logits.

    The order is: convert, `tensor_parallel`, `shard` over another mesh dimension, optimizer. All ranks must start with
    the same weights.

    Args:
        mesh: 1-D; for a larger mesh, the tensor-parallel dimension, `mesh["tensor"]`.
        sequence: sequence parallel outside of attention and feed-forward.

    Returns:
        The sharding of each layer, and what is sent for it.

    Raises:
        ConfigError: the model has another structure, or the number of ranks does not divide its heads.
        UnsupportedError: a layer that cannot be sharded, a recipe with stored scales, or a parameter that is sharded
            already or shared by layers that are sharded differently. Nothing is changed.
    """
    blocks = _blocks(model, mesh, sequence)
    styles: dict[str, Parallel | Replicated] = {
        "attention_norm": Replicated(sequence=sequence),
        "attention": Parallel(["wq", "wk", "wv"], ["wo"], sequence=sequence),
        "ffn_norm": Replicated(sequence=sequence),
        "feed_forward": Parallel(["w1", "w3"], ["w2"], sequence=sequence),
    }
    rows, placements = [], [placed for end in _ends(model) for placed in all_replicated(end)]
    for prefix, block in blocks.items():
        for part, style in styles.items():
            module, where = block.get_submodule(part), full_name(prefix, part)
            placements += style.placements(module, mesh.size(), where)
            if isinstance(style, Parallel):
                names = *style.columns, *style.rows
                rows += [
                    _row(module.get_submodule(name), full_name(where, name), style, name, mesh.size()) for name in names
                ]
    check_placements(placements, mesh)  # of all blocks before one is changed
    for block in blocks.values():
        parallelize_module(block, mesh, {**styles})
        kinds = [pair for part, style in styles.items() for pair in style.gradient_kinds(block.get_submodule(part))]
        LocalParameters(block, kinds, mesh)
    _place_ends(model, mesh, sequence)
    return TensorParallelPlan(ranks=mesh.size(), sequence=sequence, layers=tuple(rows))


_ENDS = ("tok_embeddings", "norm", "lm_head")
_PARTS = {"attention": ("wq", "wk", "wv", "wo"), "feed_forward": ("w1", "w2", "w3")}


def _blocks(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> dict[str, nn.Module]:
    if mesh.ndim != 1:
        raise ConfigError(
            f"tensor_parallel: a mesh of {mesh.ndim} dimensions. Pass the one to shard over, as mesh['tensor']."
        )
    wanted = [f"{part}.{layer}" for part, layers in _PARTS.items() for layer in layers]
    blocks = dict(getattr(model, "layers", nn.ModuleList()).named_children())
    missing = [f"layers.{n}.{name}" for n, block in blocks.items() for name in wanted if not _has(block, name)]
    if missing or not blocks:
        raise ConfigError(
            f"tensor_parallel: {type(model).__name__} has no {missing[0] if missing else 'layers'}: it supports models "
            "with the structure of octavo.lab.models.llama. For others call parallelize_module with a plan of "
            "octavo.distributed.Parallel."
        )
    if sequence and not all(_has(model, name, nn.Module) for name in _ENDS):
        raise UnsupportedError(
            f"tensor_parallel: {type(model).__name__} is part of a model, without {' or '.join(_ENDS)}, and receives "
            "all tokens. Take sequence=False."
        )
    for name, block in blocks.items():
        attention = block.get_submodule("attention")
        heads = [attention.get_submodule(x).out_features // attention.head_dim for x in ("wq", "wk")]
        if any(count % mesh.size() for count in heads):
            raise ConfigError(
                f"tensor_parallel: layers.{name}.attention has {heads[0]} query and {heads[1]} key-value heads, which "
                f"{mesh.size()} ranks cannot share. Take a number of ranks that divides both."
            )
    return {f"layers.{name}": block for name, block in blocks.items()}


def _has(module: nn.Module, name: str, kind: type[nn.Module] = nn.Linear) -> bool:
    try:
        return isinstance(module.get_submodule(name), kind)
    except AttributeError:
        return False


def _ends(model: nn.Module) -> list[nn.Module]:
    """Return embedding, last norm and head, of which a pipeline stage has only some."""
    return [getattr(model, name) for name in _ENDS if getattr(model, name, None) is not None]


def _place_ends(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    """Replicate embedding, last norm and head, and shard the tokens between them.

    The model reads the head's weight for its loss, and does not call it.
    """
    ends = _ends(model)
    distribute([placed for end in ends for placed in all_replicated(end)], mesh)
    LocalParameters(model, [(end, SUMMED if sequence else SAME) for end in ends], mesh)
    if not sequence:
        return
    group = mesh.get_group()
    targets: list[Tensor | None] = []
    model.get_submodule("tok_embeddings").register_forward_pre_hook(lambda _, args: local_tokens(args[0], group))

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[1] if len(args) > 1 else kwargs.get("targets_BT")
        targets[:] = [None if given is None else local_tokens(given, group)]
        if len(args) > 1:
            return (args[0], targets[0], *args[2:]), kwargs
        return args, kwargs if given is None else {**kwargs, "targets_BT": targets[0]}

    def leave(_: nn.Module, args: Any, result: Tensor) -> Tensor:
        if targets[0] is None:
            return all_gather_replicated(result, group)
        counted = targets[0].ne(IGNORED)
        return mean_of_tokens(result, counted.sum() if result.dim() == 0 else counted.sum(1), group)

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(leave)


def _row(layer: nn.Module, name: str, style: Parallel, attribute: str, ranks: int) -> LayerPlan:
    assert isinstance(layer, nn.Linear)
    by_columns = attribute in style.columns
    sent: QuantSpec | str = "" if by_columns else _rotation_note(layer, ranks)
    if by_columns and style.sequence:
        sent = input_codes_or_reason(layer)
    return LayerPlan(
        name=name,
        shape=(layer.out_features, layer.in_features),
        cut="columns" if by_columns else "rows",
        sent=f"{sent.format} {sent.granularity}" if isinstance(sent, QuantSpec) else "bfloat16",
        reason=sent if isinstance(sent, str) else "",
    )


def _rotation_note(layer: nn.Linear, ranks: int) -> str:
    """Return a note if a rank rotates its part of a row-parallel layer's inputs by smaller blocks than whole rows."""
    whole, part = _blocks_of(layer, ranks)
    if part == whole:
        return ""
    inputs = layer.in_features // ranks
    return f"rotated by blocks of {abs(part)}, {largest_block(part)} that divides a rank's {inputs} inputs"


def _blocks_of(layer: nn.Module, ranks: int) -> tuple[int, int]:
    """Return the blocks by which a layer rotates whole rows of its inputs, and the parts of `ranks`."""
    if not isinstance(layer, LinearLayer) or not layer.recipe.fprop.is_fp8:
        return 1, 1
    inputs, largest = layer.in_features, layer.recipe.fprop.input.signed_rotation
    return block_for(inputs, largest), block_for(inputs // ranks, largest)


def _target_now(columns: Sequence[nn.Module]) -> QuantSpec | None:
    """Return the codes in which layers currently read their input, or None where they read its values."""
    if any(isinstance(layer, LinearLayer) and not layer.enabled for layer in columns):
        return None
    found = {input_codes_or_reason(layer) for layer in columns}
    one = found.pop() if len(found) == 1 else None
    return one if isinstance(one, QuantSpec) else None


def _rounds_gradient(layer: nn.Module) -> bool:
    """Return whether both backward GEMMs of a layer round its gradient to E4M3, and all their scales are powers of two.

    Those of the other operand too: folded, they are multiplied into the gradient.
    """
    if not isinstance(layer, LinearLayer) or not layer.enabled:
        return False
    pairs = [(gradient, other) for name, gradient, other in layer.recipe.gemms() if name != "fprop"]
    kinds = {(gradient.format, gradient.rounding, gradient.scale_from) for gradient, _ in pairs}
    scalings = {operand.scaling for pair in pairs for operand in pair}
    return len(pairs) == 2 and kinds == {("e4m3", "nearest", "current")} and scalings == {"power_of_two"}


def _check_recipe(layer: nn.Module, name: str, parts: int) -> None:
    """Check that a layer's recipe can compute with a part of its weight. parts: of the inputs, 1 if they are whole."""
    if isinstance(layer, LinearLayer) and layer.recipe.has_stored_scales:
        raise UnsupportedError(
            f"tensor parallel: {name}: recipe '{layer.recipe.name}' has stored per-tensor scales, and a rank has parts "
            "of tensors. Take 'folded', 'rowwise', 'block' or 'tensorwise'."
        )
    if not isinstance(layer, LinearLayer):
        return
    (whole, part), share = _blocks_of(layer, parts), layer.in_features // parts
    if whole != part and not is_rotatable(share):
        raise UnsupportedError(
            f"tensor parallel: {name}: recipe '{layer.recipe.name}' rotates its inputs, and no block of "
            f"{SMALLEST_ROTATION} or more divides the {share} inputs of a rank. Take fewer ranks, or 'folded'."
        )
