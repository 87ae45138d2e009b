"""`Sampling`: what the models write on from a prompt, as text that people can read beside the loss."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from octavo.kernels.runtime import ledger
from octavo.lab.data.chat import ChatFormat
from octavo.lab.data.tokenizer import Tokenizer
from octavo.lab.loop import Part
from octavo.lab.train import events
from octavo.lab.train.config import RunConfig
from octavo.lab.train.guarding import GuardedRun
from octavo.lab.train.setup import tokenizer_of
from octavo.lab.train.train_state import RunStep, TrainState

PROMPT = 32
"""Tokens of the held-out text that are the prompt of a run that names none."""
MULTIPLE = 64
"""Lengths are multiples of this, for FP8 GEMMs and for tensor-parallel ranks, which share tokens."""
NOTHING = -1
"""In place of an id: the logits are not finite."""


class Sampling(Part[RunStep]):
    """Lets each model continue the prompt of the run.

    It changes no number of a run: models compute in evaluation mode without gradients, eagerly, since another length
    would make compiled code of training variable, and their GEMMs are not counted; tokens are drawn by a generator of
    its own.
    """

    reads = "weights"

    def __init__(self, run: GuardedRun) -> None:
        self._run, self._settings = run, run.config.sample
        self._tokenizer: Tokenizer | None = None
        self._ids: Sequence[int] = ()

    def is_due(self, step: RunStep) -> bool:
        """Return True every `sample.every` steps, and at the last step."""
        every = self._settings.every
        return every > 0 and (self._run.is_every(every) or self._run.is_last)

    def after_step(self, step: RunStep) -> bool:
        """Sample from each model, and emit it."""
        run = self._run
        if self._tokenizer is None:
            self._tokenizer = tokenizer_of(run.config.data)
            self._ids = self._prompt(self._tokenizer)
        text = {state.name: self._continued(state, self._tokenizer) for state in run.setup.states}
        run.log.emit(events.Sampled(step=run.done, prompt=self._tokenizer.decode(self._ids), text=text))
        run.log.restart_clock(run.done)
        return False

    def _prompt(self, tokenizer: Tokenizer) -> Sequence[int]:
        """Return the ids of the prompt."""
        if not self._settings.prompt:
            first_T = self._run.setup.heldout[0][0][0][:PROMPT]
            return [int(each) for each in torch.where(first_T < 0, ~first_T, first_T)]  # ~: it begins a document
        return encoded(self._settings.prompt, self._run.config, tokenizer)

    @torch.no_grad()
    def _continued(self, state: TrainState, tokenizer: Tokenizer) -> str:
        """Return what a model writes, up to the end of the document; all ranks call it."""
        settings, longest = self._settings, self._run.config.model.sequence
        width = min(-(-(len(self._ids) + settings.tokens) // MULTIPLE) * MULTIPLE, longest)
        generator = torch.Generator().manual_seed((self._run.config.run.seed * 1_000_003 + self._run.done) % 2**63)
        known = [*self._ids]
        state.make_room()
        state.model.eval()
        try:
            with ledger.apart(), _eager(state):
                for _ in range(settings.tokens):  # to the end on all ranks, which compute together
                    recent = known[-width:]
                    ids_1T = torch.tensor([recent + [tokenizer.end_of_document] * (width - len(recent))])
                    logits_V = state.logits(ids_1T.to(state.device))[0, len(recent) - 1]
                    drawn = chosen(logits_V, settings.temperature, generator)
                    known.append(self._run.ranks.broadcast(drawn))
                    if known[-1] == NOTHING:
                        break
        finally:
            state.model.train()
        written = known[len(self._ids) :]
        if tokenizer.end_of_document in written:
            written = written[: written.index(tokenizer.end_of_document)]
        if NOTHING in written:
            return f"{tokenizer.decode(written[:-1])}[its logits are not finite]"
        return tokenizer.decode(written)


def encoded(prompt: str, config: RunConfig, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a prompt: of a question in the chat template of the run, or of text as documents begin."""
    if config.data.format == "chat":
        chat = ChatFormat.of(config.data.tokenizer, config.data.sequence)
        message = {"role": "user", "content": prompt}
        return [*map(int, tokenizer.encode_template(chat.text([message], add_generation_prompt=True)))]
    begin = [tokenizer.begin_of_document] if config.separates_text and tokenizer.begin_of_document is not None else []
    return [*begin, *map(int, tokenizer.encode_batch([prompt])[0])]


def chosen(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Return the likeliest id, or with a temperature one drawn from `softmax(logits / temperature)`, on the CPU.

    `NOTHING` if a logit is NaN or the largest infinite: to end a run or a baseline is not for samples to do.
    """
    logits_V = logits_V.double().cpu()
    if not (largest := logits_V.max()).isfinite():
        return NOTHING
    if temperature == 0:
        return int(logits_V.argmax())
    weights_V = ((logits_V - largest) / temperature).softmax(0)
    return int(torch.multinomial(weights_V, 1, generator=generator))


def _eager(state: TrainState) -> AbstractContextManager[object]:
    """Return a block in which compiled blocks run eagerly. Where nothing is compiled, the compiler is not imported."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
