"""Compiled code on fake tensors: the graphs of `torch.compile`, run node by node, counting only what takes memory.

The graphs are those of a real run: Dynamo's, through AOTAutograd and its partitioner, with Inductor's decompositions.
Inductor's fusion is modelled by a rule: pointwise operations and reductions are fused into their readers. Their results
take memory only where an operator that is not fused reads them, or where they leave the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from octavo.lab.memory.recorder import Recorder


def compiler(recorder: Recorder) -> Callable[..., Any]:
    """Return a backend of `torch.compile` that takes Inductor's place and records allocations."""

    def graph_compiler(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        return Graph(graph, recorder)

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd  # imported late: slow, and needed for compiled code only
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        def partition(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
            return min_cut_rematerialization_partition(joint, joint_inputs, compiler="inductor", **options)

        compiled = aot_autograd(
            fw_compiler=graph_compiler,
            bw_compiler=graph_compiler,
            inference_compiler=graph_compiler,
            partition_fn=partition,
            decompositions={op: how for op, how in select_decomp_table().items() if op not in _ATTENTION},
        )
        return compiled(graph, inputs)

    return backend


_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
"""Operators that are not decomposed: on a GPU they are one kernel."""


class Graph(fx.Interpreter):
    """A graph as a callable; it takes the list of its inputs, and empties it."""

    def __init__(self, module: fx.GraphModule, recorder: Recorder) -> None:
        super().__init__(module)
        self._boxed_call = True  # AOTAutograd's flag for that; wrappers copy the attributes of the instance
        self._recorder = recorder
        nodes = list(module.graph.nodes)
        self._fused = {node for node in nodes if _is_fusible(node)}
        self._fused_away = self._fused - _materialised(nodes, self._fused)
        self._dying = _last_readers(nodes, self._fused_away)
        kept = {*self._fused, nodes[-1]}
        self.user_to_last_uses = {node: dead for node, dead in self._dying.items() if node not in kept}

    def __call__(self, arguments: list[Any]) -> Any:
        """Run the graph and return the tuple of its outputs."""
        try:
            return self.boxed_run(arguments)
        finally:
            self.env = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; a fused one takes memory only for a result that leaves its kernel."""
        if n not in self._fused:
            return super().run_node(n)
        with self._recorder.paused():
            result = super().run_node(n)
        for dead in self._dying.get(n, ()):  # a fused kernel may write into inputs that it reads last
            self.env.pop(dead, None)
        if n not in self._fused_away:
            self._recorder.enter(result)
        return result


def _is_view(node: fx.Node) -> bool:
    """Return whether the node's result has no memory of its own."""
    if node.target is operator.getitem or node.target == torch.ops.aten._unsafe_view.default:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _is_fusible(node: fx.Node) -> bool:
    """Return whether Inductor fuses a node: pointwise operations, reductions, copies."""
    if node.op != "call_function" or _is_view(node):
        return False
    from torch._functorch.partitioners import get_default_op_list

    return getattr(node.target, "overloadpacket", node.target) in get_default_op_list().fusible_ops


def _materialised(nodes: Sequence[fx.Node], fused: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes whose results are written to memory, for an operator that is not fused or for the caller."""
    readers = (node for node in nodes if node not in fused and not _is_view(node))
    return {_origin(source) for reader in readers for source in reader.all_input_nodes}


def _origin(node: fx.Node) -> fx.Node:
    """Return the node whose memory a view aliases."""
    while node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _last_readers(nodes: Sequence[fx.Node], fused_away: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return the values that each node is the last to need; nodes that are fused away are computed in their readers."""
    place = {node: index for index, node in enumerate(nodes)}
    last: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        readings = [last[user] if user in fused_away else place[user] for user in node.users]
        last[node] = max(readings, default=place[node])
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node, index in last.items():
        dying.setdefault(nodes[index], []).append(node)
    return dying
