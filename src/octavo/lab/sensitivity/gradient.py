"""Effect of each GEMM in FP8, alone, on the direction of the model's gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.errors import NonFiniteError
from octavo.lab.sensitivity.loss import FORWARD_BACKWARD, Loss, ReportPasses
from octavo.lab.sensitivity.precision_switch import Choice, PrecisionSwitch, alone, fullest
from octavo.nn.experts import ExpertLinear
from octavo.numerics import cosine_of, inner_products

Gradients = Mapping[str, Tensor]


def gradients(switch: PrecisionSwitch, chosen: Mapping[str, Choice], batches: Sequence[Any], loss: Loss) -> Gradients:
    """Return the gradient of the loss summed over all batches, by parameter, with choices applied.

    Raises:
        NonFiniteError: it is not finite: its cosine would be NaN.
    """
    model = switch.model
    model.zero_grad(set_to_none=True)
    with switch.using(chosen), torch.enable_grad():
        for batch in batches:
            loss(model, batch).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    _check_finite(found, chosen)
    return found


def _check_finite(found: Gradients, chosen: Mapping[str, Choice]) -> None:
    finite = torch.stack([gradient.isfinite().all() for gradient in found.values()]).tolist() if found else []
    broken = next((name for name, is_finite in zip(found, finite, strict=True) if not is_finite), None)
    if broken is None:
        return
    where = f"localize: the gradient of '{broken}' is not finite,"
    if not chosen:
        raise NonFiniteError(
            f"{where} in high precision. Load a good checkpoint, or leave out the batch that causes it."
        )
    layer = " ".join([next(iter(chosen)) if len(chosen) == 1 else "every layer's", *next(iter(chosen.values()))])
    raise NonFiniteError(
        f"{where} with {layer} in FP8. octavo.observed names the operand; keep the layer in BF16 by a policy to "
        "localise the others."
    )


def cosine(a: Gradients, b: Gradients) -> float:
    """Return the cosine of two gradients, each as one vector; 1 where both are zero."""
    return cosine_of(_sum(_products(a, b)))


def cosines(
    switch: PrecisionSwitch, batches: Sequence[Any], loss: Loss, report: ReportPasses
) -> dict[str, dict[str, float]]:
    """Return per layer and GEMM the cosine between the model's gradients with it in FP8 and in high precision.

    A GEMM that needs another one in FP8 is compared with that one alone (`precision_switch.alone`). All wgrads that can
    be in FP8 alone share one backward pass: each changes only the gradient of its own weight.
    """
    found: dict[str, dict[str, float]] = {name: {} for name in switch.layers}
    passes = FORWARD_BACKWARD * len(batches)
    report("gradient, high precision", passes)
    plain = gradients(switch, {}, batches, loss)
    report("gradient, wgrad", passes)
    for name, value in _all_wgrads(switch, plain, batches, loss).items():
        found[name]["wgrad"] = value
    for name, offered in switch.offered.items():
        pairs = {gemm: alone(gemm, offered) for gemm in fullest(offered) if gemm not in found[name]}
        known: dict[Choice, Gradients] = {(): plain}  # only those needed again: each is as large as the model
        for gemm, (before, after) in pairs.items():
            report(f"gradient, {name} {gemm}", passes)
            if before not in known:
                known[before] = gradients(switch, {name: before}, batches, loss)
            turned = gradients(switch, {name: after}, batches, loss)
            found[name][gemm] = cosine(turned, known[before])
            if after in {first for first, _ in pairs.values()}:
                known[after] = turned
    return found


def backward_passes(switch: PrecisionSwitch) -> int:
    """Return the least number of passes of `cosines` over its batches; GEMMs that depend on others can add a few."""
    gemms = sum(len(fullest(offered)) for offered in switch.offered.values())
    return 2 + gemms - len(switch.only("wgrad"))


def _all_wgrads(switch: PrecisionSwitch, plain: Gradients, batches: Sequence[Any], loss: Loss) -> dict[str, float]:
    chosen = switch.only("wgrad")
    if not chosen:
        return {}
    products = _products(gradients(switch, chosen, batches, loss), plain)
    whole = _sum(products)[2]
    names = {id(parameter): name for name, parameter in switch.model.named_parameters()}
    found = {}
    for name in chosen:
        layer, own = switch.layers[name], torch.zeros(3, dtype=torch.float64)
        for part in layer.parts if isinstance(layer, ExpertLinear) else [layer.weight]:
            own = own + products.get(names[id(part)], 0)
        found[name] = cosine_of(whole - own[2] + own)  # all other gradients are unchanged
    return found


def _products(a: Gradients, b: Gradients) -> dict[str, Tensor]:
    """Return `inner_products` per parameter on the CPU, with a single synchronisation."""
    if not b:
        return {"": torch.zeros(3, dtype=torch.float64)}
    stacked = torch.stack([inner_products(a[name], b[name]) for name in b]).cpu()
    return dict(zip(b, stacked, strict=True))


def _sum(products: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([*products.values()]).sum(0)
