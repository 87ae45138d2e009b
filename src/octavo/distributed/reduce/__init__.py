"""Gradient reductions over ranks, by name.

| name         | on the wire                            | accumulation                                       |
|--------------|----------------------------------------|----------------------------------------------------|
| `fp32`       | FP32                                   | FP32, by the backend                               |
| `bf16`       | BF16                                   | FP32, on the receiving rank                        |
| `bf16-plain` | BF16                                   | by the backend, rounded to BF16 at each hop        |
| `fp8-block`  | E4M3, one scale per 128 values         | FP32, on the receiving rank                        |
| `fp8-lm`     | E4M3, one scale per tensor, with mu    | by the backend, rounded to E4M3 at each hop        |
| `two-level`  | BF16 within a host, `fp8-block` across | FP32, on the receiving rank                        |
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from octavo.distributed.reduce.fp8_lm import FP8LM
from octavo.distributed.reduce.scheme import BF16, FP32, FP8Block, PlainBF16, Scheme, TwoLevel
from octavo.errors import ConfigError, did_you_mean

FLAT: dict[str, type[Scheme]] = {scheme.name: scheme for scheme in (FP32, BF16, PlainBF16, FP8Block, FP8LM)}
"""Reductions for any group of ranks."""
REDUCTIONS = (*FLAT, TwoLevel.name)


def reduction(name: str, mesh: DeviceMesh | None = None) -> Scheme:
    """Return a new reduction by name.

    Args:
        mesh: (hosts, ranks of a host), for `two-level` and for no other.

    Raises:
        ConfigError: the name is unknown, or a mesh is missing or too much.
    """
    if name == TwoLevel.name:
        if mesh is None:
            raise ConfigError("reduction 'two-level': pass mesh=init_device_mesh(device, (hosts, ranks of a host)).")
        return TwoLevel(mesh)
    if name not in FLAT:
        near = did_you_mean(name, REDUCTIONS)
        raise ConfigError(f"unknown reduction '{name}'.{near} Reductions: {', '.join(REDUCTIONS)}.")
    if mesh is not None:
        raise ConfigError(f"reduction '{name}' has no levels: leave out the mesh, or take 'two-level'.")
    return FLAT[name]()
