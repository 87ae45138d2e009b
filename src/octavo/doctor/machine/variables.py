"""Environment variables: those in force that decide numbers or speed, and those left over from looking for a fault."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.doctor.check import Finding, check, ok, warning
from octavo.doctor.subjects import Machine
from octavo.monitor.environment import PREFIXES

SLOW: dict[str, tuple[tuple[str, ...], str]] = {
    "CUDA_LAUNCH_BLOCKING": (("1",), "the host waits for every kernel"),
    "CUDA_MODULE_LOADING": (("EAGER",), "all kernels are loaded at the start"),
    "NCCL_IB_DISABLE": (("1",), "hosts speak over slow networks"),
    "NCCL_P2P_DISABLE": (("1",), "GPUs speak through main memory"),
    "NVIDIA_TF32_OVERRIDE": (("0",), "products in FP32 use no tensor cores"),
    "OCTAVO_TRITON": (("0",), "every pass but the products runs as the reference"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("1",), "every tensor is allocated by the driver"),
    "TORCHDYNAMO_DISABLE": (("1",), "nothing is compiled"),
    "TORCH_COMPILE_DISABLE": (("1",), "nothing is compiled"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is checked"),
    "TORCH_USE_CUDA_DSA": (("1",), "kernels look for faults of their own"),
    "TRITON_INTERPRET": (("1",), "Triton kernels are interpreted on the CPU"),
}
"""Values that make every step slower, and why. To add one, add a line."""


@check(
    "variables",
    symptom="the same run is slower here than elsewhere, or than yesterday",
    remedy="Unset them, unless they are meant.",
)
def variables(machine: Machine) -> Finding:
    """Look for variables that make a run slow."""
    return judge(machine.environ)


def judge(environ: Mapping[str, str]) -> Finding:
    """Return the finding for an environment."""
    in_force = {name: value for name, value in sorted(environ.items()) if name in SLOW or name.startswith(PREFIXES)}
    slow = [name for name, (values, _) in SLOW.items() if in_force.get(name) in values]
    if slow:
        seen = "; ".join(f"{name}={in_force[name]}: {SLOW[name][1]}" for name in slow)
        return warning(seen, remedy=f"unset {' '.join(slow)}, unless they are meant.", slow=slow)
    return ok(f"{len(in_force)} in force that matter, none of them slow" if in_force else "none in force that matters")
