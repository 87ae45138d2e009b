"""Optimizers whose state takes one byte where it can: `AdamW`, `Adam`, `Lion`, over one storage with tiers by name."""

from octavo.optim.convert import flatten, unflatten
from octavo.optim.optimizer import Optimizer
from octavo.optim.rules import Adam, AdamW, Lion
from octavo.optim.states import TIERS, States, bytes_per_parameter, keep_none, keep_small, states_named

__all__ = [
    "TIERS",
    "Adam",
    "AdamW",
    "Lion",
    "Optimizer",
    "States",
    "bytes_per_parameter",
    "flatten",
    "keep_none",
    "keep_small",
    "states_named",
    "unflatten",
]
