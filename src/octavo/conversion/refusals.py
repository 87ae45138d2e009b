"""Plans that `convert` refuses to carry out."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import nn

from octavo.conversion.blocks import Wrapped
from octavo.conversion.plan import Plan
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.runtime.devices import GPUS
from octavo.kernels.runtime.dispatch import architecture, is_planning, planning_for, triton_unsupported_reason
from octavo.tensor import WrapperTensor


def refuse_unapplied(plan: Plan) -> None:
    """Raise if the policy asks for activations in FP8 somewhere that the plan cannot give.

    Raises:
        UnsupportedError: names the first option without effect and the reason.
    """
    if plan.unapplied and plan.policy.memory != "low":  # `low` asks only where the model allows it
        raise UnsupportedError(
            f"{plan.unapplied[0]}. Leave the option out, or convert with strict=False to go without it there."
        )


def device_unsupported_reason(device: torch.device) -> str | None:
    """Return why a device would run FP8 layers as the reference; None for a CPU, or with `OCTAVO_TRITON=0`."""
    found = architecture(device)
    if is_planning():
        return found.refused or found.no_triton or None
    if device.type in ("cpu", "meta"):
        return None
    asked = os.environ.get("OCTAVO_TRITON") == "0"
    return found.refused or (None if asked else triton_unsupported_reason(device))


def refuse_reference(plan: Plan) -> None:
    """Raise if a GPU or another accelerator would run reference kernels, some hundred times slower than BF16.

    Raises:
        UnsupportedError: names the device, or the first layer whose recipe has no kernel there, and the reason.
    """
    if plan.device in GPUS:
        with planning_for(plan.device):
            refuse_reference(replace(plan, device="cuda"))
        return
    device = torch.device(plan.device)
    if not plan.fp8_layers or device.type in ("cpu", "meta"):
        return
    instead = "allow_reference=True (--allow-reference) runs the reference kernels, slowly."
    if reason := device_unsupported_reason(device):
        raise UnsupportedError(
            f"{plan.device} ({architecture(device).name}) cannot train in FP8: {reason}. Train in BF16 (recipe 'bf16')"
            f" or on a CPU; {instead}"
        )
    for layer in plan.layers:
        if layer.is_fp8 and "reference" in layer.kernels:
            raise UnsupportedError(
                f"{layer.name or 'the model itself'}: recipe '{layer.recipe}' has no fast kernel on {plan.device} "
                f"({layer.reason}). Choose another recipe; {instead}"
            )


def refuse_sharded(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise if layers can no longer change: wrapped by FSDP1, or sharded by `octavo.distributed.shard`.

    Raises:
        UnsupportedError: names what sharded the model, and the alternative.
    """
    if any(hasattr(module, "_fsdp_wrapped_module") for module in model.modules()):
        raise UnsupportedError(
            "FullyShardedDataParallel (FSDP1) has taken the weights out of their layers. Convert the model before it is"
            " sharded, or shard it by PyTorch's fully_shard."
        )
    for name, layer in layers.items():
        if isinstance(getattr(layer.weight, "_local_tensor", None), WrapperTensor):
            raise UnsupportedError(
                f"{name}.weight is gathered as FP8 codes, in the format of its recipe (octavo.distributed.shard), which"
                " cannot change now. Shard the model before it is converted: it then gathers values, for any recipe."
            )


def refuse_wrapped(model: nn.Module, changed: Collection[str]) -> None:
    """Raise if a module whose class is to change is recomputed or offloaded as a block of its own.

    The wrapper is a class in front of the module's: a change behind it would be undone with it, or would remove it.

    Args:
        changed: full names of these modules.

    Raises:
        ConfigError: names the module.
    """
    for name in changed:
        if isinstance(model.get_submodule(name), Wrapped):
            raise ConfigError(
                f"{name or 'the model itself'} is recomputed or offloaded as a block of its own, and its class cannot "
                "change meanwhile: call `remove()` of what octavo.recompute or octavo.offload returned first, and wrap "
                "it again afterwards. Nothing has been changed."
            )
