"""Scales that a model keeps from step to step, when it is taken back or converted anew."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from octavo.nn.scales import scales


def kept_scales(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the scales that a model keeps, by name; empty for none."""
    book = scales(model)
    return {} if book is None else book.state_dict()


def take_over(model: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Let a model go on with what `kept_scales` returned, also where its layers have other recipes since.

    A scale that was not kept then, or with another history, stays as it is.
    """
    book = scales(model)
    if book is None:
        return
    now = book.state_dict()
    fits = {name: tensor for name, tensor in kept.items() if name in now and tensor.shape == now[name].shape}
    book.load_state_dict({**now, **fits})
