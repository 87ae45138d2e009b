"""How far each product in FP8, alone, turns the gradient of the whole model away."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.numerics import cosine_of, inner_products
from octavo.sensitivity.choices import Choice, alone
from octavo.sensitivity.loss import Loss
from octavo.sensitivity.switchboard import Switchboard

Gradients = Mapping[str, Tensor]


def gradients(board: Switchboard, chosen: Mapping[str, Choice], batches: Sequence[Any], loss: Loss) -> Gradients:
    """Return the gradient of the loss summed over all batches, computed as chosen, by parameter."""
    model = board.model
    model.zero_grad(set_to_none=True)
    with board.using(chosen), torch.enable_grad():
        for batch in batches:
            loss(model, batch).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def cosine(a: Gradients, b: Gradients) -> float:
    """Return the cosine of two gradients, each as one vector; 1 where both are zero."""
    return cosine_of(_sum(_products(a, b)))


def cosines(
    board: Switchboard, batches: Sequence[Any], loss: Loss, report: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    """Return for each layer and GEMM the cosine of the model's gradient with it in FP8 and with it in high precision.

    A GEMM that is not in FP8 without another is compared with that other alone (`choices.alone`). All wgrads that can
    be are measured in one backward: each changes the gradient of its own weight and nothing else.
    """
    found: dict[str, dict[str, float]] = {name: {} for name in board.layers}
    report("gradient, high precision")
    plain = gradients(board, {}, batches, loss)
    report("gradient, wgrad")
    for name, value in _all_wgrads(board, plain, batches, loss).items():
        found[name]["wgrad"] = value
    for name, offered in board.offered.items():
        pairs = {gemm: alone(gemm, offered) for gemm in max(offered, key=len) if gemm not in found[name]}
        known: dict[Choice, Gradients] = {(): plain}  # as few as are needed again: each is as large as the model
        for gemm, (before, after) in pairs.items():
            report(f"gradient, {name} {gemm}")
            if before not in known:
                known[before] = gradients(board, {name: before}, batches, loss)
            turned = gradients(board, {name: after}, batches, loss)
            found[name][gemm] = cosine(turned, known[before])
            if after in {first for first, _ in pairs.values()}:
                known[after] = turned
    return found


def _all_wgrads(board: Switchboard, plain: Gradients, batches: Sequence[Any], loss: Loss) -> dict[str, float]:
    chosen = board.all("wgrad")
    if not chosen:
        return {}
    products = _products(gradients(board, chosen, batches, loss), plain)
    whole = _sum(products)[2]
    names = {id(parameter): name for name, parameter in board.model.named_parameters()}
    found = {}
    for name in chosen:
        own = products.get(names[id(board.layers[name].weight)], torch.zeros(3, dtype=torch.float64))
        found[name] = cosine_of(whole - own[2] + own)  # all but this gradient are as they were
    return found


def _products(a: Gradients, b: Gradients) -> dict[str, Tensor]:
    """Return `inner_products` of each parameter, on the CPU; the device is waited for once."""
    if not b:
        return {"": torch.zeros(3, dtype=torch.float64)}
    stacked = torch.stack([inner_products(a[name], b[name]) for name in b]).cpu()
    return dict(zip(b, stacked, strict=True))


def _sum(products: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([*products.values()]).sum(0)
