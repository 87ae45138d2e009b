"""Workloads: stacks of Llama blocks or encoder layers, a whole Llama with head, loss and optimizer, or a ResNet.

A stack has no embedding, head or optimizer, so that the blocks are compared. All parameters of a Llama and
of encoder layers are BF16. A ResNet is in channels last; its convolutions and head are BF16, batch norms FP32;
convolutions are converted even without a gain, so that the table shows their cost: `octavo.convert` by default leaves
them all in BF16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from octavo import optim, recipes
from octavo.errors import ConfigError
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.flops import matmul_parameters
from octavo.lab.models.llama import Block, Llama, rotary_tables
from octavo.nn.conv import unsupported_reason_recipe
from octavo_bench.implementations import BF16, Implementation, implementations
from octavo_bench.resnet import ResNet


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Shape of a model and of its batch."""

    name: str
    """Name in results; `custom` if a field was given by hand."""
    dim: int
    """Width of the residual stream."""
    ffn: int
    """Hidden width of the feed-forward."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    layers: int
    """Blocks."""
    batch: int
    """Sequences per step."""
    sequence: int
    """Tokens per sequence."""
    vocab: int = 0
    """Token ids of a whole model; 0 for a stack of blocks."""
    document: int = 0
    """Mean tokens of a document, of random length, where documents are packed and kept apart; 0: one per sequence."""

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.sequence

    @property
    def config(self) -> ModelConfig:
        """The model's shape. A stack uses all of it except the vocabulary."""
        return ModelConfig(
            vocab=self.vocab or 1,
            dim=self.dim,
            ffn=self.ffn,
            heads=self.heads,
            kv_heads=self.kv_heads,
            layers=self.layers,
            sequence=self.sequence,
            documents="separate" if self.document else "joined",
        )

    @property
    def block_gemms(self) -> tuple[tuple[int, int], ...]:
        """(N, K) of the four GEMMs of a block that cannot be merged further: qkv, wo, w1 with w3, w2."""
        kv_dim = self.dim // self.heads * self.kv_heads
        qkv, gate_up = self.dim + 2 * kv_dim, 2 * self.ffn
        return (qkv, self.dim), (self.dim, self.dim), (gate_up, self.dim), (self.dim, self.ffn)

    @property
    def weights(self) -> int:
        """Weights of GEMMs: those of the blocks, and of the head if there is one."""
        return matmul_parameters(self.config) - (0 if self.vocab else self.dim)

    @property
    def flops(self) -> int:
        """Model FLOPs of a step: `tokens (6 weights + 6 L D T)`, causal attention at half.

        The formula of `octavo.lab.models.flops_per_token`, for a stack without the head. T is that of the document of
        the token, twice the mean of documents of geometric length. Norms, activations, quantisation and recomputation
        are not counted.
        """
        length = min(2 * self.document or self.sequence, self.sequence)
        return self.tokens * 6 * (self.weights + self.layers * self.dim * length)

    def but(self, **fields: int | None) -> Workload:
        """Return this workload with some fields replaced, named `custom`; itself if all are None.

        Raises:
            ConfigError: an impossible shape.
        """
        given = {key: value for key, value in fields.items() if value is not None}
        if not given:
            return self
        changed = replace(self, **given, name="custom")
        if changed.batch < 1 or changed.vocab < 0:
            raise ConfigError("--batch must be positive, and --vocab positive, or 0 for a stack of blocks.")
        _ = changed.config  # checks itself
        return changed


_LLAMA_1B = Workload(name="llama-1b-stack", dim=2048, ffn=8192, heads=32, kv_heads=8, layers=16, batch=4, sequence=4096)
_175B = Workload(name="175b-stack", dim=12288, ffn=32768, heads=96, kv_heads=96, layers=2, batch=8, sequence=2048)
_TINY = Workload(name="tiny", dim=128, ffn=256, heads=4, kv_heads=2, layers=2, batch=2, sequence=64)
_ALL = (
    Workload(name="llama-8b-stack", dim=4096, ffn=14336, heads=32, kv_heads=8, layers=8, batch=2, sequence=8192),
    Workload(name="llama-70b-stack", dim=8192, ffn=28672, heads=64, kv_heads=8, layers=2, batch=2, sequence=8192),
    _175B,
    replace(_175B, name="175b", vocab=51200),
    _LLAMA_1B,
    replace(_LLAMA_1B, name="llama-1b", vocab=128256),
    replace(_LLAMA_1B, name="llama-1b-packed", vocab=128256, document=512),
    _TINY,
    replace(_TINY, name="tiny-model", vocab=256),
    replace(_TINY, name="tiny-packed", vocab=256, document=12),
)
WORKLOADS = {workload.name: workload for workload in _ALL}
"""By name: blocks of Llama-3-8B and of Llama-3-70B; of GPT-175B's width and parameters, as in FP8-LM (arXiv 2310.18313,
table 3), alone and with embedding and head; Llama-3.2-1B's blocks, and the whole model, also on packed documents; three
for tests."""


class Stack(nn.Module):
    """A sequence of Llama blocks with their rotary tables."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        cos_TE, sin_TE = rotary_tables(config.head_dim, config.sequence, config.rope_theta)
        self.register_buffer("cos", cos_TE, persistent=False)
        self.register_buffer("sin", sin_TE, persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the stream after the last block."""
        for block in self.layers:
            x_BTD = block(x_BTD, self.cos, self.sin)
        return x_BTD


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A model in training: a step is the two calls in order."""

    model: nn.Module
    forward_backward: Callable[[], object]
    """Computes the gradients."""
    update: Callable[[], object]
    """Applies the gradients if there is an optimizer, and drops them."""
    optimizer: torch.optim.Optimizer | None = None

    def step(self) -> None:
        """Run one step."""
        self.forward_backward()
        self.update()


def build(
    workload: Workload | EncoderWorkload | ImageWorkload, implementation: Implementation, device: str, *, compile: bool
) -> Training:
    """Return the workload in an implementation: same weights and same random data for all implementations."""
    torch.manual_seed(0)
    if isinstance(workload, ImageWorkload):
        return _images(workload, implementation, device, compile)
    if isinstance(workload, EncoderWorkload):
        return _encoder(workload, implementation, device, compile)
    with torch.device(device):
        model: nn.Module = Llama(workload.config) if workload.vocab else Stack(workload.config)
    if isinstance(model, Llama):
        model.reset_parameters(torch.Generator(device).manual_seed(0))
    for parameter in model.parameters():  # the rotary tables stay FP32
        parameter.data = parameter.data.bfloat16()
    implementation.convert(model, workload.tokens)
    if compile and implementation.compile:
        for block in model.get_submodule("layers").children():
            block.compile(fullgraph=implementation.fullgraph)
    if workload.vocab:
        return _whole(workload, model, device, implementation.own_optimizer)
    return _stack(workload, model, device)


def _images(workload: ImageWorkload, implementation: Implementation, device: str, compile: bool) -> Training:
    with torch.device(device):
        model = workload.make().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):  # batch norms stay FP32
            module.to(torch.bfloat16)
    implementation.convert(model, workload.pixels)
    if compile and implementation.compile:
        for block in model.layers:
            block.compile(fullgraph=True, dynamic=False)
    shape = (workload.batch, 3, workload.size, workload.size)
    images = torch.randn(shape, device=device, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    classes = torch.randint(workload.classes, (workload.batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def forward_backward() -> None:
        nn.functional.cross_entropy(model(images).float(), classes).backward()

    return Training(model=model, forward_backward=forward_backward, update=update)


def _encoder(workload: EncoderWorkload, implementation: Implementation, device: str, compile: bool) -> Training:
    with torch.device(device):
        model = workload.make().bfloat16()
    implementation.convert(model, workload.tokens)
    if compile and implementation.compile and workload.compiled:
        for block in model.get_submodule("layers").children():
            block.compile(fullgraph=implementation.fullgraph)
    return _stack(workload, model, device)


def _stack(workload: Workload | EncoderWorkload, model: nn.Module, device: str) -> Training:
    shape = (workload.batch, workload.sequence, workload.dim)
    x = torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
    gradient = torch.randn_like(x)

    def update() -> None:
        model.zero_grad(set_to_none=True)
        x.grad = None

    return Training(model=model, forward_backward=lambda: model(x).backward(gradient), update=update)


def _whole(workload: Workload, model: nn.Module, device: str, own_optimizer: bool) -> Training:
    shape = (workload.batch, workload.sequence)
    tokens, targets = (torch.randint(workload.vocab, shape, device=device) for _ in range(2))
    if workload.document:  # the first id of each is flagged
        starts = torch.rand(shape, device=device) < 1 / workload.document
        tokens = torch.where(starts, ~tokens, tokens)
    optimizer: torch.optim.Optimizer
    if own_optimizer:
        optimizer = optim.AdamW(model.parameters(), lr=1e-4, states="exact", clip=1.0)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def update() -> None:
        if not own_optimizer:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def forward_backward() -> None:
        model(tokens, targets).backward()

    return Training(model=model, forward_backward=forward_backward, update=update, optimizer=optimizer)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderWorkload:
    """Shape of a stack of `nn.TransformerEncoderLayer`, pre-norm with GELU: a ViT without patches and head.

    Their attention is `nn.MultiheadAttention`.
    """

    name: str
    """Name in results; `custom` if a field was given by hand."""
    dim: int
    """Width of the residual stream."""
    ffn: int
    """Hidden width of the feed-forward."""
    heads: int
    layers: int
    batch: int
    """Sequences, or images, per step."""
    sequence: int
    """Tokens per sequence, all of which see each other."""
    compiled: bool = True
    """False: BF16 and the others in eager mode."""

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.sequence

    @property
    def flops(self) -> int:
        """Model FLOPs of a step: three times those of the forward pass."""
        one: int = _forward_flops(replace(self, batch=1))
        return 3 * self.batch * one

    def make(self) -> nn.Module:
        """Return a new model."""
        make = partial(nn.TransformerEncoderLayer, self.dim, self.heads, self.ffn, 0.0, "gelu")
        return EncoderStack([make(batch_first=True, norm_first=True) for _ in range(self.layers)])

    def example(self) -> Tensor:
        """Return an input."""
        return torch.empty(self.batch, self.sequence, self.dim)

    def implementations(self) -> dict[str, Implementation]:
        """Return its implementations: those of any model, but for recipes that attention does not take."""
        stored = {f"octavo {name}" for name in recipes.names() if recipes.load(name).has_stored_scales}
        found = implementations().items()
        return {name: one for name, one in found if name not in stored and one.package != "transformer-engine"}

    def but(self, **fields: int | None) -> EncoderWorkload:
        """Return this workload with some fields replaced, named `custom`; itself if all are None.

        Raises:
            ConfigError: a field that only language models have, or one that is not positive.
        """
        given: dict[str, Any] = {key: value for key, value in fields.items() if value is not None}
        _check_fields(self.name, given, ("dim", "ffn", "heads", "layers", "batch", "sequence"))
        return replace(self, **given, name="custom") if given else self


class EncoderStack(nn.Module):
    """A sequence of encoder layers."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the stream after the last layer."""
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return x_BTD


_VIT_L = EncoderWorkload(name="vit-l-stack", dim=1024, ffn=4096, heads=16, layers=8, batch=128, sequence=197)
_ENCODER = EncoderWorkload(name="encoder-2048-stack", dim=2048, ffn=8192, heads=16, layers=4, batch=8, sequence=2048)
_TINY_ENCODER = EncoderWorkload(name="tiny-encoder", dim=64, ffn=128, heads=4, layers=2, batch=2, sequence=16)
ENCODER_WORKLOADS = {
    workload.name: workload
    for one in (_VIT_L, _ENCODER, _TINY_ENCODER)
    for workload in (one, replace(one, name=f"{one.name}-eager", compiled=False))
}
"""By name, compiled and in eager mode: layers of ViT-L/16 on 128 images of 224 pixels, wider ones, those for tests."""


def _check_fields(name: str, given: Mapping[str, int], takes: Sequence[str]) -> None:
    if unknown := next((key for key in given if key not in takes), None):
        flags = ", ".join(f"--{key}" for key in takes)
        raise ConfigError(f"--{unknown.replace('_', '-')}: {name} has no such field, only {flags}.")
    if wrong := next((key for key, value in given.items() if value < 1), None):
        raise ConfigError(f"--{wrong} must be positive.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageWorkload:
    """Shape of a ResNet and of its batch."""

    name: str
    """Name in results; `custom` if a field was given by hand."""
    depths: tuple[int, ...] = (3, 4, 6, 3)
    """Bottlenecks per stage."""
    width: int = 64
    """Inner channels of the first stage's bottlenecks."""
    classes: int = 1000
    """Outputs of the head."""
    size: int = 224
    """Pixels of an image's side."""
    batch: int = 256
    """Images per step."""

    @property
    def tokens(self) -> int:
        """Images per step: results count them per second."""
        return self.batch

    @property
    def pixels(self) -> int:
        """Output pixels of a convolution in the second-to-last stage, for predicted gains."""
        side = self.size >> len(self.depths)
        return self.batch * side * side

    @property
    def flops(self) -> int:
        """Model FLOPs of a step: three times those of the forward pass, convolutions and the head."""
        one: int = _forward_flops(replace(self, batch=1))
        return 3 * self.batch * one

    def make(self) -> ResNet:
        """Return a new model."""
        return ResNet(self.depths, self.width, self.classes)

    def example(self) -> Tensor:
        """Return an input."""
        return torch.empty(self.batch, 3, self.size, self.size)

    def implementations(self) -> dict[str, Implementation]:
        """Return its implementations: BF16 and every recipe supported by convolutions."""
        computed = (name for name in recipes.names() if unsupported_reason_recipe(recipes.load(name)) is None)
        names = {BF16, *(f"octavo {name}" for name in computed)}
        return {name: one for name, one in implementations().items() if name in names}

    def but(self, **fields: int | None) -> ImageWorkload:
        """Return this workload with another batch, named `custom`; itself if all fields are None.

        Raises:
            ConfigError: a field that only language models have.
        """
        given: dict[str, Any] = {key: value for key, value in fields.items() if value is not None}
        _check_fields(self.name, given, ("batch",))
        return replace(self, **given, name="custom") if given else self


IMAGE_WORKLOADS = {
    workload.name: workload
    for workload in (
        ImageWorkload(name="resnet50"),
        ImageWorkload(name="tiny-resnet", depths=(1, 1), width=32, classes=16, size=32, batch=2),
    )
}
"""By name: ResNet-50 on 256 images of ImageNet's size, and one for tests."""


@cache
def _forward_flops(workload: EncoderWorkload | ImageWorkload) -> int:
    with torch.device("meta"):
        model, example = workload.make(), workload.example()
    with FlopCounterMode(display=False) as counter:
        model(example)
    return int(counter.get_total_flops())
