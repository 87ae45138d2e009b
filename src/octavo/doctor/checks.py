"""All checks, in the order in which they are made. To add one, write it in a file of its subject and add it here."""

from __future__ import annotations

from typing import Any

from octavo.doctor.check import Check
from octavo.doctor.machine import (
    accumulation,
    collectives,
    compiler,
    driver,
    gpu,
    kernels,
    resources,
    software,
    variables,
)
from octavo.doctor.model import drift, fallback, launches, layers, nonfinite, serving, shapes, syncs
from octavo.doctor.run import health

CHECKS: dict[str, tuple[Check[Any], ...]] = {
    "machine": (
        software.software,
        software.packages,
        driver.driver,
        gpu.memory_errors,
        gpu.clocks,
        resources.shared_memory,
        resources.disk,
        resources.open_files,
        variables.variables,
        kernels.choice,
        kernels.arithmetic,
        accumulation.accumulation,
        kernels.triton,
        compiler.compiler,
        collectives.collectives,
    ),
    "model": (
        layers.layers,
        nonfinite.nonfinite,
        fallback.fallback,
        shapes.shapes,
        drift.drift,
        drift.fast_sums,
        serving.serving,
        launches.launches,
        syncs.syncs,
    ),
    "run": (health.state, health.loss, health.tensors, health.events),
}
"""By what they look at: `Machine`, `Trial`, `RunReader`."""
