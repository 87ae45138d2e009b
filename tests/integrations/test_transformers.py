"""The Trainer of transformers, as its users call it: with one callback more."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers (octavo[clients])")
pytest.importorskip("accelerate", reason="needs accelerate (octavo[clients])")

from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import octavo
from octavo import kernels
from octavo.errors import ConfigError
from octavo.integrations.transformers import OctavoCallback
from octavo.kernels.runtime.ledger import is_open
from octavo.nn import Linear

FP8_LAYERS = 14
LAST = "rowwise_bf16_fprop"


def trainer(model: Any, data: Any, out: Path, steps: int, *callbacks: Any, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "max_steps": steps, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "lr_scheduler_type": "constant",
        "logging_steps": 5, "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": True, "disable_tqdm": True,
        "seed": 1, "data_seed": 1, **options,
    }  # fmt: skip
    held_out = settings.pop("eval_dataset", None)
    arguments = TrainingArguments(output_dir=str(out), **settings)
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=held_out, callbacks=list(callbacks))


def losses(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_one_line_more_trains_in_fp8_with_the_loss_of_bf16_and_says_what_ran(llama, sequences, tmp_path):
    baseline = trainer(llama(), sequences, tmp_path / "bf16", 50)
    baseline.train()
    run = trainer(llama(), sequences, tmp_path / "fp8", 50, OctavoCallback())
    assert sum(isinstance(m, Linear) for m in run.model.modules()) == FP8_LAYERS, "before the optimizer is made"
    run.train()
    expected, got = losses(baseline)[-1], losses(run)[-1]
    assert expected < 0.5 * losses(baseline)[0], "it learns"
    assert abs(got - expected) < 0.05 * expected
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    # Of each of 2 layers: fprop 7, dgrad and wgrad of q, k, v together, of o, of gate and up together, of down.
    assert all(entry["fp8_layers"] == FP8_LAYERS and entry["fp8_gemms"] == 2 * 15 for entry in logged)
    assert all(entry["fp8_fallbacks"] == 0 for entry in logged)


@pytest.mark.parametrize(
    ("options", "backend", "recipe"),
    [({"count": True}, "eager", "rotated"), ({"last_share": 0.5}, "aot_eager", LAST)],
    ids=["count", "last share"],
)
def test_a_compiled_trainer_compiles_a_graph_per_recipe_and_another_where_its_steps_are_counted(
    options, backend, recipe, llama, sequences, tmp_path
):
    torch._dynamo.reset()
    compiled = {"torch_compile": True, "torch_compile_backend": backend, "logging_steps": 2}
    run = trainer(llama(), sequences, tmp_path, 4, callback := OctavoCallback(**options), **compiled)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    run.train()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert graphs == 2 and callback.plan.recipe.name == recipe
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    assert all(e["fp8_layers"] == FP8_LAYERS and ("fp8_gemms" in e) == ("count" in options) for e in logged)


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    compile_blocks = partial(octavo.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr("octavo.integrations.transformers.compile_blocks", compile_blocks)


@pytest.mark.usefixtures("quick_compiler")
def test_blocks_are_compiled_by_one_line_and_full_masks_are_left_out(llama, sequences, tmp_path):
    plain = trainer(llama(), sequences, tmp_path, 3, OctavoCallback(), logging_steps=1)
    plain.train()
    masks: list[Any] = []
    run = trainer(llama(), WithMask(sequences), tmp_path, 3, callback := OctavoCallback(compile=True), logging_steps=1)
    assert [*callback.compiled.blocks] == ["model.layers.0", "model.layers.1"]
    run.model.model.register_forward_pre_hook(
        lambda _, args, given: masks.append(given["attention_mask"]), with_kwargs=True
    )
    torch._dynamo.utils.counters.clear()
    run.train()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert masks == [None] * 3, "dropped where batches are collated"
    assert "fp8_gemms" not in run.state.log_history[0], "counting would be a second graph"
    assert losses(run) == pytest.approx(losses(plain), rel=1e-3)
    assert run.model.config._attn_implementation == "sdpa"
    with pytest.raises(ConfigError, match="Leave out TrainingArguments"):
        trainer(llama(), sequences, tmp_path, 1, OctavoCallback(compile=True), torch_compile=True)


def test_head_and_loss_as_one_train_to_the_same_losses(llama, sequences, tmp_path):
    options = {"gradient_accumulation_steps": 2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3}
    runs = [
        trainer(llama(), sequences, tmp_path, 3, OctavoCallback(fuse_loss=fuse), eval_dataset=sequences, **options)
        for fuse in (False, True)
    ]
    for run in runs:
        run.train()
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=2e-3)
    evaluated = [[entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry] for run in runs]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=2e-3)


class WithMask(torch.utils.data.Dataset):
    """Sequences with attention masks, of which those of some have zeros."""

    def __init__(self, data: Any, zeros: int = 0) -> None:
        self.data, self.zeros = data, zeros

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        mask = torch.ones(24, dtype=torch.long)
        mask[24 - self.zeros * (index % 2) :] = 0
        return {**self.data[index], "attention_mask": mask}


@pytest.mark.usefixtures("quick_compiler")
def test_padded_batches_keep_their_masks_in_compiled_trainers(llama, sequences, tmp_path):
    torch._dynamo.reset()
    data = WithMask(sequences, zeros=5)
    plain = trainer(llama(), data, tmp_path, 2, OctavoCallback(), logging_steps=1)
    blocks = trainer(llama(), data, tmp_path, 2, OctavoCallback(compile=True), logging_steps=1)
    for run in (plain, blocks):
        run.train()
    assert losses(blocks) == pytest.approx(losses(plain), rel=1e-3)


@pytest.mark.parametrize(("policy", "made"), [(None, 14), (octavo.Policy(memory="low"), 3 * 14)])
def test_weights_are_quantised_once_per_step_under_accumulation(policy, made, llama, sequences, tmp_path):
    """By layer; the results are those of quantising in each micro-batch."""
    options = {"gradient_accumulation_steps": 3, "logging_steps": 1}
    run = trainer(llama(), sequences, tmp_path, 2, OctavoCallback(policy=policy), **options)
    with kernels.record() as ledger:
        run.train()
    assert ledger.weights == 2 * made
    if policy is None:
        octavo.convert(model := llama())
        expected = trainer(model, sequences, tmp_path, 2, **options)
        expected.train()
        assert losses(run) == losses(expected)
        assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), model.parameters(), strict=True))
    assert not run.model._forward_pre_hooks


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(llama, sequences, tmp_path):
    whole = trainer(llama(), sequences, tmp_path / "whole", 8, OctavoCallback())
    whole.train()
    options = {"save_strategy": "steps", "save_steps": 4}
    trainer(llama(), sequences, tmp_path / "cut", 4, OctavoCallback(), **options).train()
    resumed = trainer(llama(), sequences, tmp_path / "cut", 8, OctavoCallback(), **options)
    resumed.train(resume_from_checkpoint=True)
    assert all(torch.equal(p, q) for p, q in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "cut" / "checkpoint-8")
    assert not any(isinstance(m, Linear) for m in plain.modules())
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), whole.model.parameters(), strict=True))


def test_a_training_that_starts_again_counts_none_of_the_step_that_failed(llama, sequences, tmp_path):
    """As with auto_find_batch_size, after an out-of-memory error."""

    class FailsOnce(TrainerCallback):
        def on_step_end(self, *args: Any, **given: Any) -> None:
            if not self.has_failed:
                self.has_failed = True
                raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB.")

        has_failed = False

    options = {"auto_find_batch_size": True, "logging_steps": 1}
    run = trainer(llama(), sequences, tmp_path, 2, OctavoCallback(), **options)
    run.callback_handler.callbacks.insert(0, FailsOnce())
    run.train()
    assert run.callback_handler.callbacks[0].has_failed
    assert [entry["fp8_gemms"] for entry in run.state.log_history if "loss" in entry] == 2 * [2 * 15]
    assert not is_open()


def test_recipe_and_policy_and_a_callback_that_comes_late(llama, sequences, tmp_path):
    callback = OctavoCallback("rowwise", octavo.Policy(keep=["*.down_proj"]))
    run = trainer(llama(), sequences, tmp_path, 5)
    run.add_callback(callback)
    run.train()
    assert callback.plan is not None and callback.plan.recipe.name == "rowwise"
    assert callback.plan.fp8_layers == FP8_LAYERS - 2
    assert run.state.log_history[0]["fp8_layers"] == FP8_LAYERS - 2


def test_weights_in_fp8_with_their_optimizer(llama, sequences, tmp_path):
    model = llama()
    octavo.convert(model, policy=octavo.Policy(weights="fp8"))
    optimizer = octavo.optim.AdamW(model.parameters(), lr=3e-3)
    settings = TrainingArguments(
        output_dir=str(tmp_path), max_steps=20, logging_steps=5, report_to=[], use_cpu=True, bf16=True,
        disable_tqdm=True, save_strategy="no", lr_scheduler_type="constant",
    )  # fmt: skip
    run = Trainer(model=model, args=settings, train_dataset=sequences, optimizers=(optimizer, None))
    run.train()
    assert losses(run)[-1] < 0.7 * losses(run)[0]
    assert sum(isinstance(p, octavo.FP8Tensor) for p in model.parameters()) == FP8_LAYERS


def test_checkpoints_of_weights_in_fp8_hold_values(llama, sequences, tmp_path):
    def run(steps: int) -> Trainer:
        model = llama()
        octavo.convert(model, policy=octavo.Policy(weights="fp8"))
        options = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
        made = trainer(model, sequences, tmp_path, steps, **options)
        made.optimizer = octavo.optim.AdamW(model.named_parameters(), lr=3e-3)
        return made

    first = run(2)
    first.train()
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    for (name, parameter), saved in zip(first.model.named_parameters(), plain.parameters(), strict=True):
        stored = parameter.detach()
        assert torch.equal(stored.dequantize() if isinstance(stored, octavo.FP8Tensor) else stored, saved), name
    resumed = run(4)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed)[:2] == losses(first) and len(losses(resumed)) == 4


class ByHand(TrainerCallback):
    """What a user without `last_share` writes."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 4:
            octavo.convert(given["model"], LAST)


def gemms(run: Trainer) -> list[int]:
    return [entry["fp8_gemms"] for entry in run.state.log_history if "loss" in entry]


def test_the_last_share_is_that_of_a_model_converted_by_hand(llama, sequences, tmp_path):
    expected = trainer(llama(), sequences, tmp_path, 8, OctavoCallback(), ByHand(), logging_steps=1)
    plain = trainer(llama(), sequences, tmp_path, 8, OctavoCallback(), logging_steps=1)
    run = trainer(llama(), sequences, tmp_path, 8, callback := OctavoCallback(last_share=0.5), logging_steps=1)
    for each in (expected, plain, run):
        each.train()
    assert losses(run) == losses(expected)
    assert losses(run)[:4] == losses(plain)[:4] and not {*losses(run)[4:]} & {*losses(plain)[4:]}
    assert gemms(run) == 4 * [2 * 15] + 4 * [2 * 8], "those of fprop are gone"
    assert callback.plan.recipe.name == LAST and run.state.log_history[-2]["fp8_layers"] == FP8_LAYERS


@pytest.mark.parametrize("stop", [2, 4, 6])
def test_a_run_resumes_before_and_inside_the_last_share(stop, llama, sequences, tmp_path):
    options = {"logging_steps": 1, "save_strategy": "steps", "save_steps": stop}
    whole = trainer(llama(), sequences, tmp_path, 8, OctavoCallback(last_share=0.5), **options)
    whole.train()
    resumed = trainer(llama(), sequences, tmp_path, 8, OctavoCallback(last_share=0.5), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    assert losses(resumed) == losses(whole)
    assert all(torch.equal(p, q) for p, q in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))


def test_a_second_run_begins_by_the_first_recipe(llama, sequences, tmp_path):
    run = trainer(llama(), sequences, tmp_path, 2, OctavoCallback(last_share=0.5), logging_steps=1)
    for _ in range(2):
        run.train()
        assert gemms(run) == [2 * 15, 2 * 8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": octavo.Policy(weights="fp8")}, "weights stored in FP8"),
        ({"last_recipe": "rowwise_bf16_frop"}, "Did you mean 'rowwise_bf16_fprop'"),
        ({"last_recipe": "static"}, "scales"),
    ],
)
def test_what_refuses_the_last_recipe_is_raised_before_the_first_step(options, message, llama, sequences, tmp_path):
    run = trainer(llama(), sequences, tmp_path, 8, OctavoCallback(last_share=0.25, **options))
    with pytest.raises(ConfigError, match=message):
        run.train()
    assert run.state.global_step == 0
    with pytest.raises(ConfigError, match=r"last_share: 25 is not between 0 and 1"):
        OctavoCallback(last_share=25)
