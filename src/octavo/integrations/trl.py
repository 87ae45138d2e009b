"""TRL: reference models that compute as the policy does, and GRPO with an engine that has the policy's own codes.

`convert_reference(trainer)` after the trainer is made; `GRPOTrainer(..., rollout_func=Rollouts(...))`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from octavo.conversion import Plan, convert
from octavo.errors import ConfigError
from octavo.integrations.transformers import OctavoCallback
from octavo.serving import Mismatch, WeightPush, mismatch


def convert_reference(trainer: Any) -> Plan | None:
    """Convert the reference model of a trainer as its `OctavoCallback` has converted the policy, and return the plan.

    Call it before `train()`. With the same weights both then compute the same, and rewards start at zero. None, if the
    trainer has no reference model: with PEFT it is the policy without its adapters. One that is converted already is
    converted again, by the policy's recipe.

    Raises:
        ConfigError: the trainer has no `OctavoCallback`.
    """
    callback = next((c for c in trainer.callback_handler.callbacks if isinstance(c, OctavoCallback)), None)
    if callback is None:
        raise ConfigError(
            "convert_reference: the trainer has no OctavoCallback, which names the recipe. Pass it as"
            " callbacks=[OctavoCallback()]; a policy that octavo.convert converted needs octavo.convert(reference)."
        )
    callback.has_reference = True
    if (reference := getattr(trainer, "ref_model", None)) is None:
        return None
    reference = trainer.accelerator.unwrap_model(reference)
    return convert(reference, callback.recipe, policy=callback.policy, device=trainer.args.device)


class Rollouts:
    """Completions of a `vllm.LLM` that was started from `octavo.export(policy)`.

    Before each batch, weights whose codes changed are pushed into the engine. The policy is not sharded; train it with
    the recipe `served`, so that both compute alike.
    """

    mismatch: Mismatch | None = None
    """Distance of engine and policy on the tokens of the last batch, in nats per token."""

    def __init__(self, llm: Any, sampling: Any) -> None:
        """Take the engine and its sampling parameters.

        Args:
            llm: a `vllm.LLM` with `logprobs_mode="processed_logprobs"`.
            sampling: its `SamplingParams`, with `logprobs=0`, and the temperature and length of `GRPOConfig`.
        """
        self.llm, self.sampling = llm, sampling
        self._push: WeightPush | None = None

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """Return a completion of each prompt, a text or a conversation, as tokens with their log-probabilities.

        Raises:
            ConfigError: the trainer's `OctavoCallback` has a `last_share`, whose recipe is not the engine's.
        """
        callbacks = trainer.callback_handler.callbacks
        if any(isinstance(callback, OctavoCallback) and callback.switch.last_share for callback in callbacks):
            raise ConfigError("last_share: the engine keeps the recipe it started with. Leave it out with Rollouts.")
        policy = trainer.accelerator.unwrap_model(trainer.model)
        self._push = self._push or WeightPush(policy)
        self._push.to_vllm(self.llm)
        asked = [_tokens(trainer, prompt) for prompt in prompts]
        answers = self.llm.generate([{"prompt_token_ids": ids} for ids in asked], self.sampling, use_tqdm=False)
        given = [list(answer.outputs[0].token_ids) for answer in answers]
        sampled = [
            [found[token].logprob for token, found in zip(ids, answer.outputs[0].logprobs, strict=True)]
            for ids, answer in zip(given, answers, strict=True)
        ]
        ours = [_log_probabilities(policy, *each, trainer.temperature) for each in zip(asked, given, strict=True)]
        self.mismatch = mismatch(torch.cat(ours), torch.tensor([value for part in sampled for value in part]))
        trainer.log({"mismatch_kl": self.mismatch.kl, "mismatch_largest": self.mismatch.largest})
        return {"prompt_ids": asked, "completion_ids": given, "logprobs": sampled}


def _tokens(trainer: Any, prompt: Any) -> list[int]:
    """Return the ids of a prompt as the trainer itself makes them; a template gives the special tokens of its own."""
    if isinstance(prompt, str):
        encoded = trainer.processing_class(prompt)
    else:
        how = {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
        encoded = trainer.processing_class.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **how
        )
    ids: list[int] = encoded["input_ids"]
    return ids


@torch.no_grad()
def _log_probabilities(policy: Any, asked: list[int], given: list[int], temperature: float) -> Tensor:
    """Return the policy's log-probabilities of the tokens given, FP32 on the CPU."""
    tokens = torch.tensor([asked + given], device=next(policy.parameters()).device)
    logits: Tensor = policy(tokens).logits[0, len(asked) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, tokens[0, len(asked) :, None])[:, 0].cpu()
