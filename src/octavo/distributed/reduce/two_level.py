"""Two-level reduction: within a host at higher precision, over its fast links; across hosts in FP8."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from octavo.distributed.reduce.flat import BF16, FP8Block
from octavo.distributed.reduce.scheme import Scheme, padded, part_length
from octavo.errors import ConfigError


class TwoLevel(Scheme):
    """Reduce-scatter within each host, reduce across hosts, gather within the host.

    Across hosts a rank sends only its part of the host's sum: 1 / (ranks per host) of the gradient.
    """

    name = "two-level"

    def __init__(self, mesh: DeviceMesh, inner: Scheme | None = None, outer: Scheme | None = None) -> None:
        """Reduce over all ranks of a mesh (hosts, ranks of a host), `bf16` within a host and `fp8-block` across.

        Raises:
            ConfigError: the mesh is not 2-D.
        """
        super().__init__()
        if mesh.ndim != 2:
            raise ConfigError(
                f"reduction 'two-level' takes a mesh (hosts, ranks of a host), got {mesh.ndim} dimension(s): "
                "init_device_mesh(device, (hosts, ranks))."
            )
        self.mesh = mesh
        self.inner, self.outer = inner or BF16(), outer or FP8Block()
        self._across, self._within = mesh.get_group(0), mesh.get_group(1)
        self._ranks: list[int] = mesh.mesh.flatten().tolist()

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent to others; `outer.sent` are those that left the host."""
        return self.wire.sent + self.inner.sent + self.outer.sent

    def _reduce_scatter(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup, factor: float, name: str
    ) -> None:
        self._check(group)
        hosts, ranks = self._across.size(), self._within.size()
        # Group the values of one local rank on all hosts, so that the host's reduce-scatter delivers them to it.
        turned = input.view(hosts, ranks, -1).transpose(0, 1).reshape(-1)
        part = input.new_empty(hosts * output.numel(), dtype=torch.float32)
        mean = factor != 1  # of two ranks at least
        self.inner.reduce_scatter(part, turned, self._within, mean=mean, name=name)
        self.outer.reduce_scatter(output, part, self._across, mean=mean, name=name)

    def _all_reduce(self, gradient: Tensor, group: dist.ProcessGroup, factor: float, parts: Mapping[str, int]) -> None:
        self._check(group)
        ranks, mean = self._within.size(), factor != 1  # of two ranks at least
        length = part_length(gradient.numel(), ranks)
        part = gradient.new_empty(length, dtype=torch.float32)
        self.inner.reduce_scatter(part, padded(gradient, ranks * length, gradient.dtype), self._within, mean=mean)
        self.outer.all_reduce(part, self._across, mean=mean)
        gathered = self.wire.all_gather(part.to(gradient.dtype), self._within)
        gradient.copy_(gathered.view(-1)[: gradient.numel()])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the states of both levels, as `inner.<name>` and `outer.<name>`."""
        kept: dict[str, Tensor] = {}
        for level, scheme in (("inner", self.inner), ("outer", self.outer)):
            kept |= {f"{level}.{key}": value for key, value in scheme.state_dict().items()}
        return kept

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the states of both levels."""
        for level, scheme in (("inner.", self.inner), ("outer.", self.outer)):
            scheme.load_state_dict({key.removeprefix(level): v for key, v in state.items() if key.startswith(level)})

    def _check(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        if ranks != self._ranks:
            raise ConfigError(
                f"reduction 'two-level' was made for the ranks {self._ranks}, but is used for {ranks}: shard over all "
                "ranks of its mesh, in that order."
            )
