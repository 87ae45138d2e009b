"""Scripts without a framework, in the manner of nanoGPT: one line more."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from octavo.nn import Linear


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.c_attn = heads, nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width, 4), nn.LayerNorm(width)
        self.c_fc, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.down(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 96, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln_f, self.unembed = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.unembed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.unembed(self.ln_f(x)).flatten(0, 1).float(), targets.flatten())


def losses_of(convert: bool, steps: int = 50) -> list[float]:
    torch.manual_seed(0)
    model = GPT()
    if convert:
        plan = octavo.convert(model)
        assert plan.fp8_layers == 8 and not isinstance(model.unembed, Linear), "a tied head, whatever its name"
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        tokens = (torch.arange(25) * (1 + torch.arange(8)[:, None] % 3) + 5 * (step % 4)) % 93
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_loss_after_50_steps_is_that_of_bf16():
    expected, got = losses_of(False), losses_of(True)
    assert expected[-1] < 0.6 * expected[0] and abs(got[-1] - expected[-1]) < 0.02 * expected[-1]
