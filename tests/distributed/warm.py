"""Judge the models that most ranks train (`judged.py`) once: in the process that ranks are forked from.

Ranks do not wait for the disk either (`unflushed` of tests/conftest.py).
"""

from __future__ import annotations

import os

import judged  # noqa: F401  before octavo.conversion
import torch
from sharded import llama

import octavo
from octavo.lab.models import ModelConfig, build

os.fsync = lambda _: None
torch.set_num_threads(1)  # threads survive no fork
llama()
for architecture in ("llama", "moe"):  # of the preset `tiny`
    shape = ModelConfig(architecture=architecture, vocab=96, dim=32, layers=1, heads=2, ffn=64, sequence=32)
    octavo.convert(build(shape, 0), "folded", policy=octavo.Policy(min_gain=0.0))
