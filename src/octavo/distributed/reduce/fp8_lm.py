"""FP8-LM's reduction (arXiv 2310.18313, section 2.1): one scale per tensor for all ranks, and sums in FP8.

    s = mu * 448 / max over ranks and elements |g|       equations 3 and 4: every rank quantises with the same scale
    sum of FP8(s g)                                      equations 5 and 6: an all-reduce of FP8 numbers
    mean = sum / (s * ranks)

mu leaves headroom for the sum. It is halved after a step in which more than 0.001 % of the elements saturated, and
otherwise doubles over 1,000 steps. The paper counts before the sum; here the sum is counted too, since that is where
overflow occurs, and the largest share of all ranks decides.

Every partial sum is rounded to E4M3, so the error grows with the number of ranks, whatever mu is. This scheme is here
for comparison with the paper: `fp8-block` sends as many bytes and rounds each contribution once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.distributed.reduce.scheme import Scheme, padded, part_length
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.runtime.dispatch import architecture
from octavo.kernels.runtime.ledger import fall_back
from octavo.numerics import E4M3, PER_TENSOR, scale_from_amax, tile_amax, to_codes

THRESHOLD = 1e-5
"""Share of saturated elements above which mu is halved."""
GROWTH = 2.0 ** (1 / 1000)
"""Growth of mu in a step without saturation."""
LIMIT = 2.0**16
"""Upper bound of mu and of 1 / mu: otherwise gradients of zero would let it grow without bound."""
LARGEST_SCALE = 2.0**126
"""Upper bound of the scale, reached by tensors of zeros."""
LARGEST_CODE = 0x7E
"""Largest E4M3 code without its sign: 448."""


class FP8LM(Scheme):
    """One scale per tensor, shared by the ranks; E4M3 sums, by NCCL where supported."""

    name = "fp8-lm"

    def __init__(self) -> None:
        super().__init__()
        self.mu: dict[str, Tensor] = {}
        """mu by tensor, FP32 (): the same on all ranks."""
        self.saturated: dict[str, Tensor] = {}
        """Share of saturated elements by tensor, FP32 (), in the last step: the largest of all ranks."""

    def _reduce_scatter(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup, factor: float, name: str
    ) -> None:
        scale = self._scales([input], [name], group)[0]
        codes = _codes(input, scale)
        sent = _share_saturated(codes)
        summed = self._sum_scattered(codes.view(group.size(), -1), group)
        self._agree([name], torch.maximum(sent, _share_saturated(summed)).view(1), group)
        output.copy_(summed.float() * (factor / scale))

    def _all_reduce(self, gradient: Tensor, group: dist.ProcessGroup, factor: float, parts: Mapping[str, int]) -> None:
        names, sizes = list(parts), list(parts.values())
        tensors = gradient.split(sizes)
        scales = self._scales(tensors, names, group)
        codes = [_codes(tensor, scale) for tensor, scale in zip(tensors, scales, strict=True)]
        sent = torch.stack([_share_saturated(own) for own in codes])
        summed = self._sum_all(torch.cat(codes), group).split(sizes)
        self._agree(names, torch.maximum(sent, torch.stack([_share_saturated(total) for total in summed])), group)
        for tensor, scale, total in zip(tensors, scales, summed, strict=True):
            tensor.copy_(total.float() * (factor / scale))

    def _agree(self, names: Sequence[str], shares: Tensor, group: dist.ProcessGroup) -> None:
        """Store the largest shares of all ranks: a checkpoint has those of one rank."""
        self.wire.all_reduce(shares, group, dist.ReduceOp.MAX)
        self.saturated.update(zip(names, shares.unbind(), strict=True))

    def _scales(self, tensors: Sequence[Tensor], names: Sequence[str], group: dist.ProcessGroup) -> Tensor:
        """Return the agreed factors that tensors are multiplied by, FP32 (tensors,), and update mu."""
        device = tensors[0].device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "reduction 'fp8-lm' has a new state after each step, and a CUDA graph repeats the one that it was"
                " captured with. Take 'fp8-block', or run without a graph."
            )
        for name in names:
            self.mu[name] = self.mu.get(name, torch.tensor(group.size() ** -0.5, dtype=torch.float32)).to(device)
            self.saturated[name] = self.saturated.get(name, torch.tensor(0.0, dtype=torch.float32)).to(device)
        amax = torch.cat([tile_amax(tensor[None], PER_TENSOR).view(1) for tensor in tensors])
        self.wire.all_reduce(amax, group, dist.ReduceOp.MAX)
        saturated = torch.stack([self.saturated[name] for name in names])
        mu = torch.stack([self.mu[name] for name in names])
        mu = torch.where(saturated > THRESHOLD, mu * 0.5, mu * GROWTH).clamp(1 / LIMIT, LIMIT)
        self.mu.update(zip(names, mu.unbind(), strict=True))
        return (scale_from_amax(amax, E4M3, "power_of_two")[1] * mu).clamp(max=LARGEST_SCALE)

    def _sum_scattered(self, codes: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the FP8 sum of this rank's row of the ranks' codes (ranks, n)."""
        if _nccl_sums(codes, group):
            output = torch.empty_like(codes[0])
            self.wire.reduce_scatter(output, codes.view(-1), group)
            return output
        received = self.wire.all_to_all(codes, group)
        return ring_sum(received, dist.get_rank(group))

    def _sum_all(self, codes: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the FP8 sum of the ranks' codes (n,), which may be overwritten."""
        if _nccl_sums(codes, group):
            self.wire.all_reduce(codes, group)
            return codes
        length = part_length(codes.numel(), group.size())
        rows = padded(codes.view(torch.uint8), length * group.size(), torch.uint8).view(group.size(), length)
        summed = self._sum_scattered(rows.view(E4M3.dtype), group)
        return self.wire.all_gather(summed.view(torch.uint8), group).view(-1)[: codes.numel()].view(E4M3.dtype)

    def state_dict(self) -> dict[str, Tensor]:
        """Return `<tensor>.mu` and `<tensor>.saturated`, FP32 (), the same on all ranks."""
        kept = {"mu": self.mu, "saturated": self.saturated}
        return {f"{name}.{key}": value.clone() for key, table in kept.items() for name, value in table.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state; tensors that it does not name start from the default."""
        kept: dict[str, dict[str, Tensor]] = {"mu": {}, "saturated": {}}
        for key, value in state.items():
            name, _, which = key.rpartition(".")
            if which not in kept:
                raise ConfigError(f"state of reduction '{self.name}': '{key}' is neither <tensor>.mu nor .saturated.")
            kept[which][name] = value.detach().clone().float()
        self.mu, self.saturated = kept["mu"], kept["saturated"]


def ring_sum(codes: Tensor, rank: int) -> Tensor:
    """Return the sum (n,) of the ranks' E4M3 codes (ranks, n), as NCCL's ring computes it for this rank's part.

    It begins at the next rank and ends here. Each hop adds two numbers and rounds the sum to E4M3, saturating:
    `FuncSum` of FP8 in NCCL's src/device/reduce_kernel.h. NCCL adds in FP16, which has enough bits (11 >= 2 * 4 + 2)
    for double rounding to be innocuous.
    """
    ranks = codes.shape[0]
    total = codes[(rank + 1) % ranks]
    for step in range(2, ranks + 1):
        total = to_codes(total.float() + codes[(rank + step) % ranks].float(), E4M3)
    return total


def _share_saturated(codes: Tensor) -> Tensor:
    """Return the share of codes with the largest magnitude, FP32 ()."""
    return ((codes.view(torch.uint8) & 0x7F) == LARGEST_CODE).sum() / max(codes.numel(), 1)


def _codes(tensor: Tensor, scale: Tensor) -> Tensor:
    return to_codes(tensor.float() * scale, E4M3)


def _nccl_sums(codes: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether the backend sums FP8. On a GPU, if it does not, a fallback is recorded."""
    if not codes.is_cuda:
        return False
    reason = None
    if "nccl" not in dist.get_backend(group):
        reason = f"the backend {dist.get_backend(group)} has no FP8"
    elif (gpu := architecture(codes.device)).backend != "cuda" or gpu.since < (9, 0):
        reason = f"NCCL sums FP8 from compute capability 9.0, this is {gpu.name}"
    elif torch.cuda.nccl.version() < (2, 24):
        reason = "NCCL sums FP8 from 2.24"
    if reason is not None:
        fall_back(f"reduction 'fp8-lm' emulates NCCL's FP8 sums: {reason}")
    return reason is None
