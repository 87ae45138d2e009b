"""Do once what most ranks begin with: in the process that they are forked from.

That is to judge the models that they train (`judged.py`), and to look for garbage among all that is imported. Ranks do
not wait for the disk either (`unflushed` of tests/conftest.py).
"""

from __future__ import annotations

import gc
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
gc.collect()
gc.freeze()  # as in conftest.py: what is here now is never visited again, and its pages stay those of the first process
gc.set_threshold(10_000, 10, 10)
