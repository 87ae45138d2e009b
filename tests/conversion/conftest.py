"""A small model with everything that conversion must tell apart."""

import sys
from pathlib import Path

import pytest
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))  # `user_modules`


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.router = nn.Linear(width, 4 * width)
        self.tiny = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()) + self.router(x).sum() * 0 + self.tiny(x).sum() * 0


class Model(nn.Module):
    """Tied embedding and head, two blocks, a router, a layer too small, and one layer used in two places."""

    def __init__(self, width: int = 64, vocabulary: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Block(width), Block(width)])
        self.again = self.layers[0].up
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


CONVERTED = ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def converted() -> list[str]:
    return CONVERTED
