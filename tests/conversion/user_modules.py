"""Modules as users write them, which several tests of recognition share."""

import functools

from torch import nn

WIDTH = 64


def decorated(forward):
    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        return forward(*args, **kwargs)

    return wrapper


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        q = self.q(x).view(-1, 2)
        k = self.norm(self.k(x))
        v = self.v(x)
        return self.o(q.view(x.shape) + k + v)


class MLP(nn.Module):
    """As Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 96, bias=False), nn.Linear(WIDTH, 96, bias=False)
        self.down_proj = nn.Linear(96, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
