"""Optimizers with FP8 states: `AdamW`, `Adam`, `Lion`, `Muon`, with one set of storage tiers."""

from octavo.optim.convert import flatten, unflatten
from octavo.optim.muon import Muon
from octavo.optim.optimizer import Optimizer
from octavo.optim.rules import Adam, AdamW, Lion
from octavo.optim.states import TIERS, States, bytes_per_parameter, hidden_matrix, keep_none, keep_small, states_named

__all__ = [
    "TIERS",
    "Adam",
    "AdamW",
    "Lion",
    "Muon",
    "Optimizer",
    "States",
    "bytes_per_parameter",
    "flatten",
    "hidden_matrix",
    "keep_none",
    "keep_small",
    "states_named",
    "unflatten",
]
