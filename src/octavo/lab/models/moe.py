"""A mixture of experts: a Llama whose feed-forward is a choice among many small ones.

Shapes: B batch, T tokens, D dim, N = B T tokens in a row, S experts per token, X experts, F hidden width of an expert.

A router gives each expert a score, the softmax of its logits. A token goes to the S experts of the largest scores and
gets their outputs, weighted by these scores over their sum; no token is dropped. Two ways keep experts equally busy:

    bias    each expert has a bias that is added to its scores for the choice alone. After an optimizer step it grows by
            `balance_rate` where the expert had fewer tokens than the mean, and falls where it had more (Wang et al.
            2024, "Auxiliary-loss-free load balancing").
    loss    `balance_loss` times X sum_e f_e p_e joins the loss in training, f_e the share of rows and p_e the mean
            score of expert e (Fedus et al. 2022, Switch Transformer); it is 1 where all are equally busy.

Experts are plain parameters (X, 2 F, D) and (X, D, F); the products are PyTorch's grouped GEMMs until `octavo.convert`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.kernels.experts import route
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.llama import Block, FeedForward, Llama
from octavo.nn.documents import Mask
from octavo.nn.experts import collect, dispatch
from octavo.nn.grouped import grouped_linear
from octavo.nn.operands import no_autocast


class MoE(Llama):
    """Llama with a mixture of experts in each block. `forward` is that of a Llama."""

    def block(self, config: ModelConfig) -> nn.Module:
        """Return a new block."""
        return MoEBlock(config)

    def stored_form(self) -> None:
        """Return None: Hugging Face's mixtures have other routers."""

    def run_blocks(
        self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor, mask: Mask | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream after all blocks, and the balance loss of the model in training."""
        balance = x_BTD.new_zeros((), dtype=torch.float32)
        for block in self.layers:
            x_BTD, part = block(x_BTD, cos_TE, sin_TE, mask)
            balance = balance + part
        in_loss = self.training and self.config.balance_loss > 0
        return x_BTD, balance * self.config.balance_loss if in_loss else None

    @torch.no_grad()
    def balance(self, mean: Callable[[Tensor], Tensor]) -> None:
        """Move the biases of all routers after an optimizer step, and reset the counts.

        Args:
            mean: returns the mean of a tensor over ranks.
        """
        for block in self.layers:
            mixture = block.get_submodule("feed_forward")
            assert isinstance(mixture, Mixture)
            counts = mean(mixture.counts)
            mixture.bias += self.config.balance_rate * torch.sign(counts.mean() - counts)
            mixture.counts.zero_()


class MoEBlock(Block):
    """Attention, then experts, each added to the residual stream."""

    def feed(self, config: ModelConfig) -> nn.Module:
        """Return a new feed-forward."""
        return Mixture(config)

    def forward(  # type: ignore[override]
        self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor, mask: Mask | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream after this block, and its balance loss, FP32 ()."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TE, sin_TE, mask)
        y_BTD, balance = self.feed_forward(self.ffn_norm(x_BTD))
        return x_BTD + y_BTD, balance


class Mixture(nn.Module):
    """Router, experts, and shared experts that every token goes to."""

    bias: Tensor
    counts: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.each = config.experts_per_token
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.experts = Experts(config.experts, config.dim, config.ffn_dim)
        self.experts.top_k = self.each
        shared = config.shared_experts * config.ffn_dim
        self.shared = FeedForward(config, shared) if shared else None
        self.register_buffer("bias", torch.zeros(config.experts))
        self.register_buffer("counts", torch.zeros(config.experts), persistent=False)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (B,T,D), and the balance loss."""
        x_ND = x_BTD.flatten(0, -2)
        with no_autocast(x_ND.device.type):  # a small error sends a token to another expert
            scores_NX = F.linear(x_ND.float(), self.router.weight.float()).softmax(dim=-1)
        ids_NS = (scores_NX.detach() + self.bias).topk(self.each, dim=-1).indices
        weights_NS = scores_NX.gather(1, ids_NS)
        weights_NS = weights_NS / weights_NS.sum(dim=-1, keepdim=True)
        used_X = torch.zeros_like(self.counts).scatter_add(0, ids_NS.flatten(), self.counts.new_ones(ids_NS.numel()))
        if self.training and torch.is_grad_enabled():
            self.counts += used_X
        balance = len(used_X) * (used_X / max(ids_NS.numel(), 1) * scores_NX.mean(dim=0)).sum()
        y_BTD = self.experts(x_ND, ids_NS, weights_NS).view(x_BTD.shape)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD), balance


class Experts(nn.Module):
    """SwiGLU experts: `down[e](silu(gate[e](x)) * up[e](x))`."""

    top_k: int
    """Number of experts per token."""

    def __init__(self, experts: int, dim: int, ffn: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * ffn, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, ffn))

    def forward(self, x_ND: Tensor, ids_NS: Tensor, weights_NS: Tensor) -> Tensor:
        """Return the weighted sum of the experts of each token, (N,D)."""
        routing = route(ids_NS, len(self.gate_up))
        rows, weights = dispatch(x_ND, weights_NS, routing)
        gate, up = grouped_linear(rows, self.gate_up, routing.ends).chunk(2, dim=-1)
        y = grouped_linear(F.silu(gate) * up, self.down, routing.ends)
        return collect(y * weights[:, None].to(y.dtype), routing)
