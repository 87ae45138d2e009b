"""Stages for `torch.distributed.pipelining` that send activations and gradients in fewer bytes.

    parts = octavo.models.stages.stages(model, 2)                 # after octavo.convert
    stage = PipelineStage(parts[rank], rank, 2, device, group=mesh["pipeline"].get_group(), sent="fp8")
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=given_loss, scale_grads=True)

All of PyTorch's schedules support converted layers, including those that compute gradients of inputs and of weights
separately (zero bubble, arXiv 2401.10241), which need PyTorch 2.13; see `octavo.nn.needed_grads`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TorchPipelineStage
from torch.torch_version import TorchVersion

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels import QuantSpec
from octavo.nn import Linear
from octavo.nn.weight_codes import quantize_matrix
from octavo.numerics import Quantized, dequantize

Sent = Literal["as is", "bf16", "fp8"]
_SENT = ("as is", "bf16", "fp8")
_CODES = QuantSpec("e4m3", "row", "power_of_two")
_SCALE_BYTES = 4


class PipelineStage(TorchPipelineStage):
    """Pipeline stage that sends activations in BF16, or as FP8 codes with one scale per token; gradients in BF16.

    Scales are powers of two. With FP8 the residual stream itself is rounded to E4M3 (3 bits of mantissa) between
    stages, more coarsely than by any other operation of a block; backward treats the rounding as the identity. All
    stages of a pipeline must use the same format. Between two stages of one rank nothing is sent.

    Args:
        submodule, stage_index, num_stages, device, kwargs: as for PyTorch's `PipelineStage`.
        sent: `as is` (also gradients), `bf16` or `fp8`.

    Attributes:
        sent_bytes: bytes that this stage has sent to other ranks, activations and gradients.

    Raises:
        ConfigError: an unknown `sent`.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        sent: Sent = "bf16",
        **kwargs: Any,
    ) -> None:
        if sent not in _SENT:
            raise ConfigError(f"PipelineStage: sent = {sent!r} is none of {', '.join(map(repr, _SENT))}.")
        super().__init__(submodule, stage_index, num_stages, device, **kwargs)
        self.sent, self.sent_bytes = sent, 0
        self._pending: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that send a microbatch's activations."""
        return self._packed(super().get_fwd_send_ops(fwd_chunk_id), self.sent)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that send the gradients of a microbatch's inputs."""
        return self._packed(super().get_bwd_send_ops(bwd_chunk_id), self._gradients)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive a microbatch's activations."""
        return self._awaited(super().get_fwd_recv_ops(fwd_chunk_id), ("forward", fwd_chunk_id), self.sent)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive the gradients of a microbatch's outputs."""
        return self._awaited(super().get_bwd_recv_ops(bwd_chunk_id), ("backward", bwd_chunk_id), self._gradients)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        """Run backward on a microbatch, like PyTorch's stage.

        Raises:
            UnsupportedError: gradients of inputs only, with FP8 layers, before PyTorch 2.13.
        """
        converted = any(isinstance(module, Linear) for module in self.submod.modules())
        if not full_backward and converted and TorchVersion(torch.__version__) < "2.13":
            raise UnsupportedError(
                f"PipelineStage: PyTorch {torch.__version__} computes gradients of inputs and weights separately only "
                "in its own layers. Take PyTorch 2.13, or Schedule1F1B or ScheduleInterleaved1F1B."
            )
        return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    @property
    def _gradients(self) -> Sent:
        return "as is" if self.sent == "as is" else "bf16"

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        self._unpack("forward", fwd_chunk_id)
        return super()._retrieve_recv_activations(fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        self._unpack("backward", bwd_chunk_id)
        return super()._retrieve_recv_grads(bwd_chunk_id)

    def _packed(self, operations: list[dist.P2POp], sent: Sent) -> list[dist.P2POp]:
        for operation in operations:
            operation.tensor = pack(operation.tensor.detach(), sent)
            self.sent_bytes += operation.tensor.nbytes
        return operations

    def _awaited(self, operations: list[dist.P2POp], key: tuple[str, int], sent: Sent) -> list[dist.P2POp]:
        """Redirect receive operations into packed buffers, and record the tensor that each is for."""
        for operation in operations:
            target = operation.tensor.detach()
            if _is_packed(target, sent):
                operation.tensor = pack(torch.zeros_like(target), sent)
                self._pending.setdefault(key, []).append((target, operation.tensor))
        return operations

    def _unpack(self, direction: str, chunk: int) -> None:
        for target, received in self._pending.pop((direction, chunk), ()):
            target.copy_(unpack(received, target))


def given_loss(output: Tensor, _: Any = None) -> Tensor:
    """`loss_fn` of a schedule, for a last stage that computes the loss itself."""
    return output.mean()


def pack(x: Tensor, sent: Sent) -> Tensor:
    """Return a tensor as it is sent: unchanged, BF16, or bytes (rows, K + 4), codes and scale of each row."""
    if not _is_packed(x, sent):
        return x.contiguous()
    if sent == "bf16":
        return x.to(torch.bfloat16)
    made = quantize_matrix(x.reshape(-1, x.shape[-1]), _CODES)
    return torch.cat([made.codes.view(torch.uint8), made.scale.contiguous().view(torch.uint8)], dim=1)


def unpack(received: Tensor, like: Tensor) -> Tensor:
    """Return the values of a tensor packed by `pack`, in the shape of `like`."""
    if received.dtype != torch.uint8:
        return received
    codes = received[:, :-_SCALE_BYTES].contiguous().view(_CODES.fmt.dtype)
    scale = received[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
    return dequantize(Quantized(codes, scale, _CODES.tile)).view(like.shape)


def _is_packed(x: Tensor, sent: Sent) -> bool:
    if sent == "as is" or not x.is_floating_point() or x.dim() < 2:
        return False
    return sent == "fp8" or x.dtype != torch.bfloat16
