"""Linear layers in compiled code, where every function, class and field that Dynamo reads is a guard in later calls.

While Dynamo traces, layers and tensors are at hand as they are (`ask_tracer`): what decides how to compute is read
there, by ordinary code, without a guard. The guards are those on `call_key` of each layer, on classes, on the host
state, and on tensors. Nothing changes while code is traced but by that code itself, whose writes versions count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from octavo._util.compiler import answer, ask_tracer, enter_graph, module_of, version_in
from octavo.errors import OctavoError
from octavo.kernels.runtime import host_state
from octavo.nn.attached_codes import has_traced_source, is_made_by_attention
from octavo.nn.first_call import note_traced
from octavo.nn.functional import UNKNOWN, _Linears, check_operands, compute_dtype
from octavo.nn.recognised import Recognised
from octavo.nn.shared import PENDING, PendingOutputs, compute_together, joins
from octavo.nn.telemetry_ops import which_buffer

if TYPE_CHECKING:
    from octavo.nn.linear import LinearLayer


def traced_output(layer: LinearLayer, x: Tensor) -> Tensor | None:
    """Return the output of a layer for x (..., K) in compiled code; None: compute as in eager mode, which may raise.

    The first call of a group computes the outputs of all its layers. The others are attached to x.
    """
    turn = ask_tracer(x, _find_turn, layer)
    if turn is None:
        return None
    asks, places, numbers, keys = turn
    if layer.call_key != keys[0] or (asks and not layer.is_as_converted()):
        return None
    if places is None:
        return _outputs([layer], x)[0]
    waiting = getattr(x, PENDING, None)
    if waiting is None:
        waiting = PendingOutputs()
        setattr(x, PENDING, waiting)
    pending = waiting.traced.pop(numbers[0], None)
    if pending is not None and pending[1] == keys[0] and pending[2] == _state(layer, x):
        y: Tensor = pending[0]
        return y
    group: Any = layer.shared
    members = [layer, *[group._members[place]() for place in places]]
    others = range(1, len(members))  # `zip` is a guard more
    for i in others:
        if members[i].call_key != keys[i] or members[i].shared is not group:
            return None
    outputs = _outputs(members, x)
    for i in others:
        waiting.traced[numbers[i]] = outputs[i], keys[i], _state(members[i], x)
    return outputs[0]


def _outputs(layers: Sequence[LinearLayer], x: Tensor) -> list[Tensor]:
    """Return the outputs of layers of one group and recipe, or of one layer: `compute_together` with few guards."""
    weights = [layer.weight for layer in layers]
    call = ask_tracer([x, *weights], _find_call, layers[0])
    if call is None:
        guard_forward_of_linear()
        return compute_together(layers, x)
    constants, has_scales, which = call
    slot: Any = layers[0].scaling_slot if has_scales else None
    scales = slot.scale_and_amax if has_scales else None
    stats = getattr(layers[0].stats_slot, which) if which else None
    outputs: Sequence[Tensor] | None = apply(_Linears, x, constants, (scales, stats), weights)
    if outputs is None:
        return compute_together(layers, x)
    ys = []
    for i in range(len(outputs)):
        y = outputs[i].reshape(*x.shape[:-1], outputs[i].shape[1])
        bias = layers[i].bias
        ys.append(y if bias is None else y + bias.to(y.dtype))
    return ys


def apply(function: Any, x: Tensor, constants: Any, buffers: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Any:
    """Return the results of an `opaque` function for x (..., K), of which it gets (M, K); None if codes of x are known.

    Args:
        constants: the values of its arguments for known codes, each None; its options.
        buffers: stored scales and statistics, as it takes them.
    """
    guard_forward_of_linear()
    if has_traced_source(x):
        return None
    enter_graph(host_state.now.is_open_to_compilers)
    tokens = 1
    for size in x.shape[:-1]:  # `math.prod` is two guards more
        tokens = tokens * size
    return function.apply(x.reshape(tokens, x.shape[-1]), *constants[0], *buffers, constants[1], *weights)


def guard_forward_of_linear() -> bool:
    """Let traced code have a guard on the `forward` that Octavo's layers replace."""
    return nn.Linear.forward is None


def _state(layer: LinearLayer, x: Tensor) -> Any:
    """Return a constant of what, besides its `call_key`, the output of a layer for x depends on."""
    return ask_tracer([x, layer.weight, layer.bias], _find_state, None)


# --- asked while Dynamo traces ----------------------------------------------------------------------------------------


def _find_turn(context: Any) -> None:
    """Answer None if eager code is to compute, and raise, otherwise four values.

    Whether the layer is to tell if it is as converted, which more than `nn.Linear.forward` decides; the places in its
    group of other layers that its call computes, None if it is computed alone; and `id` and `call_key` of the layer and
    of these.
    """
    layer = module_of(context)
    asks = isinstance(layer, Recognised) or type(layer).parent is not nn.Linear
    if not layer.enabled or not issubclass(context.get_local("x").python_type(), Tensor):
        return answer(None)
    if not asks and not layer.is_as_converted():
        return answer(None)
    x, weight = context.get_local("x").as_fake(), layer._parameters.get("weight")
    if weight is not None and not fit(x, weight):
        return answer(None)
    others = _others(layer)
    members = [layer, *[other for _, other in others or ()]]
    places = None if others is None else tuple([place for place, _ in others])
    return answer((asks, places, tuple(map(id, members)), tuple([each.call_key for each in members])))


def fit(x: Tensor, weight: Tensor) -> bool:
    """Return whether `check_operands` lets these pass."""
    try:
        check_operands(x, weight)
    except OctavoError:
        return False
    return True


def _others(layer: LinearLayer) -> list[tuple[int, LinearLayer]] | None:
    """Return the layers that the call of this one computes besides it, by their places; None if it is on its own."""
    group = layer.shared
    if group is None:
        return None
    joined = [(place, each) for place, each in enumerate(group.at()) if each is not None and joins(group, each, layer)]
    if not any(each is layer for _, each in joined):
        return None
    return [pair for pair in joined if pair[1] is not layer] if joined[0][1] is layer else []


def _find_call(context: Any) -> None:
    """Answer the arguments of `_Linears` that are constants, whether there are stored scales, and `which_buffer` is.

    None for anything unusual.

    x is the input, and the weights of layers that are computed together; the module is the first of them.
    """
    layer = module_of(context)
    x, *weights = tensors_of(context)
    layers = [layer, *[other for _, other in _others(layer) or ()]][: len(weights)]
    if not are_usual(layers) or layer.weight_codes is not None or (layer.shared and layer.shared.lends_scales(layers)):
        return answer(None)
    plan = layer.recipe.plan
    keeps_input = layer.keeps_input or (plan.requantises_exactly and is_made_by_attention(context, x))
    note_traced()
    options = plan.key, compute_dtype(x), keeps_input, torch.is_grad_enabled()
    return answer(((UNKNOWN, options), layer.scaling_slot is not None, which_buffer(layers)))


def _find_state(context: Any) -> None:
    tensors = tensors_of(context)
    versions = [version_in(context, each) for each in tensors]
    answer((compute_dtype(tensors[0]), torch.is_grad_enabled(), tensors[0].requires_grad, *versions))


def tensors_of(context: Any) -> list[Tensor]:
    """Return the tensors of the list that `ask_tracer` was given, as Dynamo traces with them."""
    return [proxy.node.meta["example_value"] for proxy in context.get_local("x").as_proxy() if proxy is not None]


def are_usual(layers: Sequence[LinearLayer]) -> bool:
    """Return whether the weights of layers are plain parameters, (N, K)."""
    return all(isinstance(each, nn.Linear) and type(each._parameters.get("weight")) is nn.Parameter for each in layers)
