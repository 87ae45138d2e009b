"""Trainers of TRL: supervised fine-tuning, DPO with its reference model, GRPO with an engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs trl (octavo[clients])")

from accelerate import Accelerator
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.generation import vllm_generation

import octavo
from octavo.errors import ConfigError
from octavo.integrations.transformers import OctavoCallback, _needs_reference
from octavo.integrations.trl import Rollouts, _tokens, convert_reference
from octavo.nn import Linear
from octavo.serving import WeightPush

FP8_LAYERS = 14
SIZES = {
    "vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

WORDS = [f"w{i}" for i in range(90)]
SETTINGS: dict[str, Any] = {
    "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "logging_steps": 1, "save_strategy": "no",
    "report_to": [], "use_cpu": True, "bf16": True, "disable_tqdm": True, "gradient_checkpointing": False,
}  # fmt: skip


@pytest.fixture
def tokenizer() -> Any:
    """Return a tokenizer of whole words: nothing is downloaded."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{word: 3 + i for i, word in enumerate(WORDS)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def text(start: int, step: int = 1) -> str:
    return " ".join(WORDS[(start + step * i) % len(WORDS)] for i in range(16))


def test_supervised_fine_tuning(llama, tokenizer, tmp_path):
    data = Dataset.from_list([{"text": text(i)} for i in range(48)])
    run = SFTTrainer(
        model=llama(), args=SFTConfig(output_dir=str(tmp_path), max_length=32, **SETTINGS), train_dataset=data,
        processing_class=tokenizer, callbacks=[OctavoCallback(last_share=0.5)],
    )  # fmt: skip
    run.train()
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    assert logged[-1]["loss"] < logged[0]["loss"] and all(entry["fp8_layers"] == FP8_LAYERS for entry in logged)
    assert [entry["fp8_gemms"] for entry in logged] == 3 * [2 * 15] + 3 * [2 * 8]


def test_dpo_whose_reference_is_converted_too_starts_without_a_margin(llama, tokenizer, tmp_path):
    data = [{"prompt": text(i), "chosen": " " + text(i + 16), "rejected": " " + text(i, 7)} for i in range(24)]
    reference = llama()
    octavo.convert(reference)
    run = DPOTrainer(
        model=llama(), ref_model=reference, args=DPOConfig(output_dir=str(tmp_path), max_length=64, **SETTINGS),
        train_dataset=Dataset.from_list(data), processing_class=tokenizer, callbacks=[OctavoCallback()],
    )  # fmt: skip
    assert sum(isinstance(m, Linear) for m in run.model.modules()) == FP8_LAYERS
    run.train()
    logged = [entry for entry in run.state.log_history if "rewards/margins" in entry]
    assert abs(logged[0]["rewards/margins"]) < 1e-3, "the same model computes the same"
    assert logged[-1]["rewards/margins"] > logged[0]["rewards/margins"] + 1e-3
    assert logged[0]["fp8_layers"] == FP8_LAYERS


def dpo(llama, tokenizer, out, **given):
    """Return a trainer whose reference model TRL loads itself."""
    llama().save_pretrained(out / "base")
    data = [{"prompt": text(i), "chosen": " " + text(i + 16), "rejected": " " + text(i, 7)} for i in range(8)]
    settings = SETTINGS | {"max_steps": 1} | given
    return DPOTrainer(
        model=LlamaForCausalLM.from_pretrained(out / "base"),
        args=DPOConfig(output_dir=str(out), max_length=64, **settings), train_dataset=Dataset.from_list(data),
        processing_class=tokenizer, callbacks=[OctavoCallback("folded")],
    )  # fmt: skip


def margin(run):
    run.train()
    return next(abs(entry["rewards/margins"]) for entry in run.state.log_history if "rewards/margins" in entry)


def test_a_reference_that_the_trainer_made_is_converted_as_the_policy(llama, tokenizer, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("octavo.kernels.runtime.ledger._warned", set())
    run = dpo(llama, tokenizer, tmp_path)
    plan = convert_reference(run)
    assert plan is not None and plan.recipe.name == "folded" and plan.fp8_layers == FP8_LAYERS
    assert margin(run) < 1e-6 and "reference" not in caplog.text


def test_a_reference_in_high_precision_is_warned_of(llama, tokenizer, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("octavo.kernels.runtime.ledger._warned", set())
    run = dpo(llama, tokenizer, tmp_path)
    assert margin(run) > 1e-6 and "convert_reference(trainer)" in caplog.text


def test_no_reference_no_warning(llama, tokenizer, tmp_path, caplog):
    run = dpo(llama, tokenizer, tmp_path, precompute_ref_log_probs=True)
    assert convert_reference(run) is None
    run.callback_handler.callbacks = [c for c in run.callback_handler.callbacks if not isinstance(c, OctavoCallback)]
    with pytest.raises(ConfigError, match="no OctavoCallback"):
        convert_reference(run)
    config = GRPOConfig(output_dir=str(tmp_path), beta=0.0, num_generations=2, **SETTINGS)
    assert not _needs_reference(run.model, config) and _needs_reference(
        run.model, DPOConfig(output_dir=str(tmp_path), **SETTINGS)
    )


def grpo(
    model: Any, tokenizer: Any, out: Any, steps: int, last_share: float = 0.0, **given: Any
) -> tuple[Any, list[float]]:
    """Reward completions for their share of even tokens; return the trainer and the mean reward of each step."""
    callback = OctavoCallback("served", octavo.Policy(min_gain=0), last_share=last_share)
    more = {"max_steps": steps, "per_device_train_batch_size": 16, "learning_rate": 1e-2}
    settings = SETTINGS | more | {"lr_scheduler_type": "constant"}
    args = GRPOConfig(
        output_dir=str(out), num_generations=8, max_completion_length=8, beta=0.0, loss_type="grpo", **settings
    )
    run = GRPOTrainer(
        model=model, args=args, train_dataset=Dataset.from_list([{"prompt": text(i)} for i in range(8)]),
        reward_funcs=lambda completion_ids, **_: [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids],
        processing_class=tokenizer, callbacks=[callback], **given,
    )  # fmt: skip
    run.train()
    return run, [entry["reward"] for entry in run.state.log_history if "reward" in entry]


def test_grpo_that_samples_from_the_policy_itself(llama, tokenizer, tmp_path):
    run, rewards = grpo(llama(), tokenizer, tmp_path, 12)
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    assert all(entry["fp8_layers"] == FP8_LAYERS for entry in run.state.log_history if "loss" in entry)


class Engine:
    """A `vllm.LLM` as `Rollouts` knows it, on a model of its own: all that it knows of the policy was pushed."""

    def __init__(self, model: Any) -> None:
        self.model, self.pushes = model.eval(), []
        octavo.convert(self.model, "served", policy=octavo.Policy(min_gain=0))

    def collective_rpc(self, method: str, kwargs: Any) -> None:
        assert method == "reload_weights"
        tensors = dict(kwargs["weights_iterator"])
        self.pushes.append(len(tensors))
        with torch.no_grad():
            for name in [name for name in tensors if not name.endswith("_scale")]:
                scale = tensors.get(f"{name}_scale", torch.ones(1))
                self.model.get_parameter(name).copy_(tensors[name].float() * scale)

    def reset_prefix_cache(self) -> None:
        pass

    @torch.no_grad()
    def generate(self, prompts: Any, sampling: Any, use_tqdm: bool) -> list[Any]:
        ids = torch.tensor([prompt["prompt_token_ids"] for prompt in prompts])  # of one length
        found: list[list[Any]] = [[] for _ in prompts]
        for _ in range(sampling):
            odds = self.model(ids).logits[:, -1].float().log_softmax(-1)
            ids = torch.cat([ids, odds.exp().multinomial(1)], 1)
            for each, token, row in zip(found, ids[:, -1].tolist(), odds, strict=True):
                each.append({token: SimpleNamespace(logprob=float(row[token]))})
        given = zip(ids[:, -sampling:].tolist(), found, strict=True)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=t, logprobs=f)]) for t, f in given]


def test_grpo_whose_engine_gets_the_codes_of_each_step(llama, tokenizer, tmp_path):
    torch.manual_seed(0)
    engine, model = Engine(llama()), llama().bfloat16()
    rollouts = Rollouts(engine, 8)
    run, _ = grpo(model, tokenizer, tmp_path, 3, rollout_func=rollouts)
    assert engine.pushes[0] == len(list(WeightPush(model))) and len(engine.pushes) == 3
    kl = [entry["mismatch_kl"] for entry in run.state.log_history if "mismatch_kl" in entry]
    assert len(kl) == 3 and max(kl) < 1e-4, "engine and policy differ by what rounds their residual streams"

    logged = [entry for entry in run.state.log_history if "loss" in entry]
    assert all(entry["fp8_layers"] == FP8_LAYERS and entry["fp8_gemms"] > 0 for entry in logged)

    with pytest.raises(ConfigError, match="last_share: the engine keeps the recipe it started with"):
        grpo(llama().bfloat16(), tokenizer, tmp_path, 3, last_share=0.5, rollout_func=Rollouts(engine, 8))
    assert len(engine.pushes) == 3

    engine.collective_rpc = lambda method, kwargs: None  # a push that is lost
    rollouts([text(0)], run)
    assert rollouts.mismatch.kl > 1e-3


def test_a_conversation_begins_with_one_token_that_begins_it_and_takes_the_options_of_its_template(tokenizer):
    """Tokenizers such as Llama's add the token that begins a text, and so do their templates."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    template = "{{ bos_token }} {% for m in messages %}{{ m.content }} {% endfor %}{{ 'w9' if thinks else 'w8' }}"
    trainer: Any = SimpleNamespace(processing_class=tokenizer, chat_template=template, chat_template_kwargs={})
    assert _tokens(trainer, [{"role": "user", "content": "w0 w1"}]) == [1, 3, 4, 11]
    trainer.chat_template_kwargs = {"thinks": True}
    assert _tokens(trainer, [{"role": "user", "content": "w0 w1"}]) == [1, 3, 4, 12]
    assert _tokens(trainer, "w0 w1") == [1, 3, 4]


@pytest.mark.parametrize("weights", ["unchanged", "fp8"])
def test_the_weight_sync_of_trl_gives_an_engine_the_values_of_the_weights(llama, tokenizer, weights):
    """TRL's own push, to a vLLM that computes in BF16: names and values are those of a model without Octavo."""
    policy, plain = llama(), llama()
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(0.5)
    octavo.convert(policy, policy=octavo.Policy(weights=weights))

    class Loaded:
        def load_weights(self, pairs: Any) -> None:
            for name, value in pairs:
                plain.get_parameter(name).data.copy_(value)

    sync = object.__new__(vllm_generation.VLLMGeneration)
    sync.model, sync.mode, sync.enable_sleep_mode, sync.accelerator = policy, "colocate", False, Accelerator(cpu=True)
    sync._dist = vllm_generation.DistributedBackend(sync.accelerator)
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=Loaded()))
    executor = SimpleNamespace(driver_worker=worker)
    sync.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor), reset_prefix_cache=lambda: None)
    sync.sync_weights()
    for name, p in policy.named_parameters():
        value = p.dequantize() if isinstance(p, octavo.FP8Tensor) else p
        assert torch.equal(plain.get_parameter(name), value.float()), name


def test_grpo_with_vllm_itself(tokenizer, tmp_path, monkeypatch):
    place = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    vllm = pytest.importorskip("vllm")
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 256}  # its attention wants heads of 32
    model = LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16()
    octavo.convert(model, "served", policy=octavo.Policy(min_gain=0))
    octavo.export(model, tmp_path / "policy")
    llm = vllm.LLM(
        str(tmp_path / "policy"), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="bfloat16",
        logprobs_mode="processed_logprobs",
    )  # fmt: skip
    sampling = vllm.SamplingParams(max_tokens=8, logprobs=0, temperature=1.0, detokenize=False)
    octavo.revert(model)  # the callback converts it again
    run, _ = grpo(model, tokenizer, tmp_path, 3, rollout_func=Rollouts(llm, sampling))
    assert all(entry["mismatch_kl"] < 1e-3 for entry in run.state.log_history if "mismatch_kl" in entry)
