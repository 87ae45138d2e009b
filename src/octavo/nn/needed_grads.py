"""The gradients that a backward pass has to compute: of the input, of the weights, or of both.

`ctx.needs_input_grad` tells only which arguments require a gradient at all. A pipeline schedule without bubbles (arXiv
2401.10241) runs backward twice, once for the inputs and later for the weights, each time by `torch.autograd.grad`.
Gradients that it does not request are not computed: like PyTorch's own layers, this asks the engine. A fused MLP needs
the gradient of its hidden activation in both passes: that GEMM is repeated.
"""

from __future__ import annotations

from typing import Any

import torch


def needed_grads(ctx: Any, first_weight: int) -> tuple[bool, list[bool]]:
    """Return whether the gradient of the first argument is needed, and the same for each weight.

    Args:
        ctx: context of an autograd function, in its backward; its first argument is a tensor, its last ones are the
            weights.
        first_weight: index of the first weight among the arguments.
    """
    needs_x, needs_weights = ctx.needs_input_grad[0], list(ctx.needs_input_grad[first_weight:])
    if torch.compiler.is_compiling():
        return needs_x, needs_weights
    nodes = [node for node, _ in ctx.next_functions]  # one per argument that is a tensor
    weights = nodes[-len(needs_weights) :]
    return needs_x and _runs(nodes[0]), [
        needed and _runs(node) for needed, node in zip(needs_weights, weights, strict=True)
    ]


def _runs(node: Any) -> bool:
    """Return whether this backward pass continues to a node of the graph."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf whose gradient `autograd.grad` returns: the engine does not tell
        return True
