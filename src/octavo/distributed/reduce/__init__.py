"""How gradients are summed over ranks: the schemes by name.

| name         | on the wire                        | sums                                                     |
|--------------|------------------------------------|----------------------------------------------------------|
| `fp32`       | FP32                               | by the backend, FP32                                     |
| `bf16`       | BF16                               | where they are needed, FP32                              |
| `bf16-plain` | BF16                               | by the backend, rounded to BF16 on the way               |
| `fp8-block`  | E4M3, a scale for 128 values       | where they are needed, FP32                              |
| `fp8-lm`     | E4M3, a scale a tensor, with mu    | by the backend, rounded to E4M3 on the way               |
| `two-level`  | BF16 in a host, `fp8-block` across | where they are needed, FP32                              |
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from octavo.distributed.reduce.fp8_lm import FP8LM
from octavo.distributed.reduce.local import BF16, FP8Block
from octavo.distributed.reduce.plain import FP32, PlainBF16
from octavo.distributed.reduce.scheme import Scheme
from octavo.distributed.reduce.two_level import TwoLevel
from octavo.errors import ConfigError, did_you_mean

FLAT: dict[str, type[Scheme]] = {scheme.name: scheme for scheme in (FP32, BF16, PlainBF16, FP8Block, FP8LM)}
"""Those that take any group of ranks."""
REDUCTIONS = (*FLAT, TwoLevel.name)


def reduction(name: str, mesh: DeviceMesh | None = None) -> Scheme:
    """Return the reduction of that name, without state.

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
        raise ConfigError(f"reduction '{name}' knows no levels: leave out the mesh, or take 'two-level'.")
    return FLAT[name]()
