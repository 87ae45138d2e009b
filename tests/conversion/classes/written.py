"""Models in the manner of popular repositories, written from scratch: nanoGPT, nanochat, modded-nanogpt and others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, VOCABULARY = 64, 4, 96


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    q, k, v = heads_of(q), heads_of(k), heads_of(v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


# --- nanoGPT: q, k and v in one layer, a layer norm of its own with an optional bias, a tied head -------------------


class BiasedNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class GPTAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(attend(*self.c_attn(x).split(WIDTH, dim=2)))


class GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = BiasedNorm(WIDTH), GPTAttention(), BiasedNorm(WIDTH)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(256, WIDTH),  # as many positions as an MLP has features
                "h": nn.ModuleList(GPTBlock() for _ in range(2)),
                "ln_f": BiasedNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.transformer.wte(ids) + self.transformer.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


# --- nanochat and modded-nanogpt: FP32 weights that each layer casts to the dtype of its input ----------------------


class CastingLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(dtype=x.dtype))


def rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class ChatAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_q, self.c_k = CastingLinear(WIDTH, WIDTH, bias=False), CastingLinear(WIDTH, WIDTH, bias=False)
        self.c_v, self.c_proj = CastingLinear(WIDTH, WIDTH, bias=False), CastingLinear(WIDTH, WIDTH, bias=False)
        self.ve_gate = CastingLinear(12, HEADS, bias=False)  # a gate that routes nothing

    def forward(self, x: Tensor, value: Tensor) -> Tensor:
        gate = 3 * torch.sigmoid(self.ve_gate(x[..., :12]))
        v = self.c_v(x) + (gate[..., None] * value.unflatten(-1, (HEADS, -1))).flatten(-2)
        return self.c_proj(attend(rms(self.c_q(x)), rms(self.c_k(x)), v))


class ChatMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc = CastingLinear(WIDTH, 4 * WIDTH, bias=False)
        self.c_proj = CastingLinear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class ChatBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = ChatAttention(), ChatMLP()

    def forward(self, x: Tensor, value: Tensor) -> Tensor:
        x = x + self.attn(rms(x), value)
        return x + self.mlp(rms(x))


class Nanochat(nn.Module):
    """4 blocks of 7 layers: 24 of 28 are large enough."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(VOCABULARY, WIDTH), "h": nn.ModuleList(ChatBlock() for _ in range(blocks))}
        )
        self.value_embeds = nn.Embedding(VOCABULARY, WIDTH)
        self.lm_head = CastingLinear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.to(torch.bfloat16)
        self.value_embeds.to(torch.bfloat16)

    def forward(self, ids: Tensor) -> Tensor:
        x, value = rms(self.transformer.wte(ids)), self.value_embeds(ids)
        for block in self.transformer.h:
            x = block(x, value)
        return 15 * torch.tanh(self.lm_head(rms(x)).float() / 15)


class CastedLinear(nn.Linear):
    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__(features_in, features_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.type_as(x))


class SpeedrunBlock(nn.Module):
    """q, k and v of modded-nanogpt are one parameter of three matrices, and so is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_w = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 8)
        self.c_proj, self.c_fc = CastedLinear(WIDTH, WIDTH), CastedLinear(WIDTH, 4 * WIDTH)
        self.mlp_proj = CastedLinear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(rms(x), self.qkv_w.flatten(0, 1).type_as(x)).chunk(3, dim=-1)
        x = x + self.c_proj(attend(q, k, v))
        return x + self.mlp_proj(F.relu(self.c_fc(rms(x))).square())


class Speedrun(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(SpeedrunBlock() for _ in range(2))
        self.lm_head = CastedLinear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = rms(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(rms(x))


# --- torchtitan: blocks in a dictionary, a head called `output`, an attention gate called `gate` ---


class GatedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(attend(self.wq(x), self.wk(x), self.wv(x)) * self.gate(x).sigmoid())


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 128, bias=False), nn.Linear(WIDTH, 128, bias=False)
        self.w2 = nn.Linear(128, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Mixture(nn.Module):
    """A router called `scores`, and experts in a list."""

    def __init__(self, experts: int = 16) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(FeedForward() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.scores(flat).softmax(-1).topk(2)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            y = y.index_add(0, rows, expert(flat[rows]) * weights[rows, slots, None])
        return y.view_as(x)


class TitanBlock(nn.Module):
    def __init__(self, mixture: bool) -> None:
        super().__init__()
        self.attention, self.attention_norm, self.ffn_norm = GatedAttention(), nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.feed_forward = Mixture() if mixture else FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(nn.Module):
    def __init__(self, mixture: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(number): TitanBlock(mixture) for number in range(2)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for block in self.layers.values():
            x = block(x)
        return self.output(self.norm(x))


class TitanMixture(Titan):
    def __init__(self) -> None:
        super().__init__(mixture=True)


# --- images: attention of PyTorch, as in open_clip and torchvision; parents that read the weights of their children ---


class TorchBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = (
            nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), nn.LayerNorm(WIDTH),
        )  # fmt: skip
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class TorchViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, WIDTH, 8, 8)
        self.encoder = nn.ModuleDict({"layers": nn.Sequential(*(TorchBlock() for _ in range(2)))})
        self.heads = nn.Sequential(nn.Linear(WIDTH, VOCABULARY))

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(self.encoder.layers(self.conv_proj(x).flatten(2).mT).mean(1))


class ReadsChildren(nn.Module):
    """Attention as in torchvision's Swin: it hands the weights of its children to a function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.mlp = (
            nn.LayerNorm(WIDTH),
            nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(self.norm(x), self.qkv.weight, self.qkv.bias).chunk(3, dim=-1)
        x = x + F.linear(attend(q, k, v, causal=False), self.proj.weight, self.proj.bias)
        return x + self.mlp(x)


class Swinlike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 8, 8)
        self.features = nn.Sequential(ReadsChildren(), ReadsChildren())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(self.stem(x).flatten(2).mT).mean(1))


class Translator(nn.Module):
    """nn.Transformer, as in PyTorch's tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 1, 1, 128, batch_first=True)
        self.generator = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.generator(self.transformer(self.source(source), self.target(target)))


class Retriever(nn.Module):
    """A model called `embedder` inside, whose layers are no embeddings, and a masked decoder outside of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedder = TorchViT()
        self.embedder.heads = nn.Identity()
        self.projection = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.projection(self.embedder(x)), dim=-1)
