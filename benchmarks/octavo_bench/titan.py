"""torchtitan's Llama, trained by torchtitan's own Trainer, for `octavo bench clients`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from octavo.integrations.torchtitan import OctavoConverter
from octavo_bench.clients import VOCABULARY, Job, Sequences


class NoTokenizer(BaseTokenizer):  # type: ignore[misc, unused-ignore]  # without torchtitan
    """Tokenizer of tokenised data."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc, unused-ignore]
        """No options."""

    def __init__(self, config: Config | None = None, **given: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **given: Any) -> list[int]:
        """Return no tokens."""
        return []

    def decode(self, *args: Any, **given: Any) -> str:
        """Return no text."""
        return ""

    def get_vocab_size(self) -> int:
        """Return the size of the vocabulary."""
        return VOCABULARY


class Loader(BaseDataLoader):  # type: ignore[misc, unused-ignore]
    """Batches of `Sequences`, resumed at the position of a checkpoint."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc, unused-ignore]
        """Number of sequences."""

        count: int = 0

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **given: Any) -> None:
        self.ids, self.batch, self.next = Sequences(config.count, seq_len + 1).ids, local_batch_size, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield inputs with the position of each token, and labels."""
        while self.next < len(self.ids):
            ids = self.ids[self.next : self.next + self.batch]
            self.next += self.batch
            positions = torch.arange(ids.shape[1] - 1).expand(len(ids), -1)
            yield {"input": ids[:, :-1].contiguous(), "positions": positions.contiguous()}, ids[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position."""
        self.next = state["next"]


def train(job: Job) -> nn.Module:
    """Train the first layers of torchtitan's 1B model, or its debug model on a CPU; return the model.

    Attention is PyTorch's SDPA: FlexAttention has no backward on a CPU.
    """
    made = config(job).build()
    inner = made.loss_fn

    def loss_fn(*args: Any, **given: Any) -> Any:
        found = inner(*args, **given)
        job.clock.losses.append((found[0] if isinstance(found, tuple) else found).detach())
        return found

    made.loss_fn = loss_fn
    try:
        made.train()
    finally:
        made.close()
        torch.distributed.destroy_process_group()  # it makes one per Trainer
    trained: nn.Module = made.model_parts[0]
    return trained


def config(job: Job) -> Trainer.Config:
    """Return torchtitan's config of a job."""
    converters = [OctavoConverter.Config(device=job.device)] if job.fp8 else None
    spec = model_registry("1B" if job.device == "cuda" else "debugmodel", converters=converters)
    model = spec.model
    model.layers = model.layers[: job.size.layers]
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCABULARY
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        tokenizer=NoTokenizer.Config(),
        dataloader=Loader.Config(count=job.size.batch * job.steps),
        optimizer=default_adamw(lr=job.size.lr),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=job.size.batch, seq_len=job.size.length, steps=job.steps, disable_cuda_graphs=True
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        activation_checkpoint=FullAC.Config(),
        compile=CompileConfig(enable=True, components=["model"], backend=job.backend),
        checkpoint=CheckpointManager.Config(
            enable=job.saves or job.resumes,
            interval=job.half,
            load_step=job.half if job.resumes else -1,
            keep_latest_k=0,
        ),
        debug=DebugConfig(seed=0),
        dump_folder=str(job.folder),
    )
