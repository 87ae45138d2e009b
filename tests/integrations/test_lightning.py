"""Lightning's Trainer and Fabric with Octavo's precision plugin."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="needs lightning (octavo[clients])")

import lightning
import ranks
import transformers
from lightning.fabric import Fabric
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import octavo
from octavo.errors import ConfigError
from octavo.integrations.lightning import FabricPrecision, LastShare, OctavoPrecision
from octavo.nn import Linear

FP8_LAYERS = 14


class Module(lightning.LightningModule):
    """What a user of Lightning writes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.losses = model, []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def fit(model: Any, data: Any, out: Path, resume: Path | None = None, **options: Any) -> Module:
    module = Module(model)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=out, **options,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    trainer.fit(module, loader, ckpt_path=resume, **({} if resume is None else {"weights_only": True}))
    trainer.save_checkpoint(out / "last.ckpt")
    return module


def test_a_plugin_trains_in_fp8_with_the_loss_of_bf16(llama, sequences, tmp_path):
    baseline = fit(llama(), sequences, tmp_path / "bf16", max_steps=50, precision="bf16-mixed").losses
    plugin = OctavoPrecision(device="cpu")
    run = fit(llama(), sequences, tmp_path / "fp8", max_steps=50, plugins=plugin)
    assert plugin.plan is not None and plugin.plan.fp8_layers == FP8_LAYERS
    assert sum(isinstance(m, Linear) for m in run.modules()) == FP8_LAYERS
    assert all(p.dtype == torch.float32 for p in run.parameters())
    assert baseline[-1] < 0.5 * baseline[0] and abs(run.losses[-1] - baseline[-1]) < 0.05 * baseline[-1]


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(llama, sequences, tmp_path):
    sequences = torch.utils.data.Subset(sequences, range(16))  # Lightning resumes where an epoch ends
    whole = fit(llama(), sequences, tmp_path, max_epochs=2, plugins=OctavoPrecision(device="cpu"))
    fit(llama(), sequences, tmp_path, max_epochs=1, plugins=OctavoPrecision(device="cpu"))
    plugin = OctavoPrecision(device="cpu")
    resumed = fit(llama(), sequences, tmp_path, tmp_path / "last.ckpt", max_epochs=2, plugins=plugin)
    assert len(resumed.losses) == 4 and resumed.losses == whole.losses[4:]
    assert all(torch.equal(p, q) for p, q in zip(resumed.parameters(), whole.parameters(), strict=True))


def test_bf16_true_whose_default_dtype_is_bf16(llama, sequences, tmp_path):
    class Converted(Module):
        def configure_model(self) -> None:
            octavo.convert(self.model)

    module = Converted(llama())
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", precision="bf16-true", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(sequences, batch_size=4))
    assert sum(isinstance(m, Linear) for m in module.modules()) == FP8_LAYERS
    assert all(p.dtype == torch.bfloat16 for p in module.parameters()) and module.losses[-1] < module.losses[0]


def test_fabric(llama, sequences):
    plugin = FabricPrecision("rowwise", device="cpu")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
    model = llama()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    losses = []
    for batch in fabric.setup_dataloaders(torch.utils.data.DataLoader(sequences, batch_size=8)):
        loss = model(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert plugin.plan is not None and plugin.plan.fp8_layers == FP8_LAYERS and losses[-1] < 0.7 * losses[0]


LAST = "rowwise_bf16_fprop"


class ByHand(lightning.Callback):
    """What a user without `LastShare` writes."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.global_step, batch_idx) == (4, 8):
            octavo.convert(pl_module, LAST)


def test_the_last_share_is_that_of_a_model_converted_by_hand_also_resumed(llama, sequences, tmp_path):
    sequences = torch.utils.data.Subset(sequences, range(48))  # Lightning resumes where an epoch ends
    given = {"accumulate_grad_batches": 2, "max_epochs": 2}  # 12 steps of two batches
    expected = fit(llama(), sequences, tmp_path, callbacks=[ByHand()], plugins=OctavoPrecision(device="cpu"), **given)
    plugin = OctavoPrecision(device="cpu")
    whole = fit(llama(), sequences, tmp_path, callbacks=[LastShare(0.67)], plugins=plugin, **given)
    assert plugin.plan.recipe.name == LAST and whole.losses == expected.losses and len(whole.losses) == 24

    cut = {**given, "max_epochs": 1}
    fit(llama(), sequences, tmp_path, callbacks=[LastShare(0.33)], plugins=OctavoPrecision(device="cpu"), **cut)
    again = {"callbacks": [LastShare(0.67)], "plugins": OctavoPrecision(device="cpu"), **given}
    resumed = fit(llama(), sequences, tmp_path, tmp_path / "last.ckpt", **again)
    assert resumed.losses == whole.losses[12:]


@pytest.mark.parametrize(
    ("options", "last", "message"),
    [
        ({"max_steps": 4}, LastShare(), "OctavoPrecision"),
        ({"max_epochs": -1, "plugins": OctavoPrecision(device="cpu")}, LastShare(), "max_steps"),
        ({"max_steps": 4, "plugins": OctavoPrecision(device="cpu")}, LastShare(recipe="static"), "scales"),
    ],
)
def test_what_refuses_the_last_share_is_raised_before_the_first_step(
    options, last, message, llama, sequences, tmp_path
):
    with pytest.raises(ConfigError, match=message):
        fit(llama(), sequences, tmp_path, callbacks=[last], **options)


SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Sharded(Module):
    """The recipe of the docs: converted, then sharded by FSDP2."""

    def __init__(self, model: Any, recipe: str) -> None:
        super().__init__(model)
        self.recipe = recipe

    def configure_model(self) -> None:
        if self.recipe:
            octavo.convert(self.model, self.recipe)
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def counting(index: int) -> dict[str, torch.Tensor]:
    ids = (torch.arange(24) * (1 + index % 3) + index * 5) % 93 + 3
    return {"input_ids": ids, "labels": ids}


def train_sharded(rank: int, size: int, recipe: str, config: dict[str, Any]) -> tuple[list[float], int]:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(GROUP_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29500")  # the group is there already
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    module, strategy = Sharded(model, recipe), ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=size, strategy=strategy, plugins=[TorchElasticEnvironment()], max_steps=6,
        precision="bf16-mixed", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    with octavo.kernels.record() as ledger:
        trainer.fit(module, torch.utils.data.DataLoader([counting(i) for i in range(96)], batch_size=8))
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    return module.losses, sum(ledger.gemms.values())


def test_fsdp2_by_the_strategy_of_model_parallelism() -> None:
    baseline, _ = ranks.run(train_sharded, 2, "", SIZES)[0]
    (losses, gemms), (_, others) = ranks.run(train_sharded, 2, "folded", SIZES)
    assert gemms == others == 6 * 2 * 15
    assert losses[-1] < losses[0] and abs(losses[-1] - baseline[-1]) < 0.05 * baseline[-1]
