"""A lane whose blocks are in stages on several ranks (`parallel.pipeline`): a schedule goes forward and backward.

The parts of a batch (`run.accumulate`) are its microbatches. Of their losses only the rank of the last stage knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from octavo.distributed import ShardPlan, TensorParallelPlan
from octavo.distributed.pipeline.run import SCHEDULES, Pipeline
from octavo.models.llama import Llama
from octavo.models.stages import Stage, stages
from octavo.train.lane import Lane
from octavo.train.parallel import whole


class PipelinedLane(Lane):
    """One model being trained, of which this rank has some stages; `model` has them under the names of the whole."""

    def _take(self, model: nn.Module) -> None:
        assert isinstance(model, Llama) and self.ranks.stages is not None  # `check_stages` has seen to it
        parallel, schedule = self.ranks.parallel, SCHEDULES[self.ranks.parallel.schedule]
        stream = torch.bfloat16 if parallel.gather == "bf16" else model.tok_embeddings.weight.dtype
        places = schedule.places(parallel.pipeline)
        parts = stages(model, len(places))
        table = [{"rank": place, "blocks": part.blocks} for place, part in zip(places, parts, strict=True)]
        self.pipeline = {"schedule": parallel.schedule, "activations": parallel.activations, "stages": table}
        own = {i: part for i, part in enumerate(parts) if places[i] == self.ranks.place}
        self.model = Stage(model, [block for part in own.values() for block in part.blocks])
        self.cut = _tensor_plan([self.ranks.cut(part, sequence=False) for part in own.values()])
        self.reduction = self.ranks.reduction()
        self.sharding = _shard_plan([self.ranks.shard(part, self.reduction, reshard=False) for part in own.values()])
        for part in own.values():  # around forward alone: the schedule goes backward too
            autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)
            part.forward = autocast(part.forward)  # type: ignore[method-assign]
        self._run = Pipeline(
            own,
            schedule,
            self.ranks.stages,
            device=self.device,
            width=model.config.dim,
            stream=stream,
            sent="as is" if parallel.activations == "stored" else parallel.activations,
        )

    def holds(self, name: str) -> bool:
        """Return whether this rank has a tensor of the lane's state, or some of it; by its name in checkpoints."""
        kind, _, own = name.partition(".")
        while own and own not in self.parameters:
            own = own.rpartition(".")[0]
        return bool(own) or kind not in ("model", "optimizer", "reduction")

    def _pass(self, inputs_BT: Tensor, targets_BT: Tensor, parts: int, scaled: Callable[[Tensor], Tensor]) -> Tensor:
        if not torch.is_grad_enabled():
            return super()._pass(inputs_BT, targets_BT, parts, scaled)
        with self._accumulating(parts):
            loss = self._run.step(inputs_BT, targets_BT, parts, scaled)
        return self.ranks.mean(torch.zeros((), device=self.device) if loss is None else loss)

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor, *, by_sequence: bool = False, **options: bool) -> Tensor:
        """Return the loss as any lane does, but without gradients, and zeros where the last stage is another rank's."""
        loss = self._run.loss(inputs_BT, targets_BT, by_sequence=by_sequence)
        if loss is None:
            return torch.zeros(len(inputs_BT) if by_sequence else (), device=self.device)
        return loss if by_sequence else loss.sum()

    def _norm(self, gradients: Iterable[Tensor | None]) -> Tensor:
        return self.ranks.norm_of_stages(whole(super()._norm(gradients)).to(self.device))


def _tensor_plan(plans: Sequence[TensorParallelPlan | None]) -> TensorParallelPlan | None:
    """Return how the stages of a rank are cut."""
    known = [plan for plan in plans if plan is not None]
    layers = tuple(layer for plan in known for layer in plan.layers)
    return TensorParallelPlan(ranks=known[0].ranks, sequence=False, layers=layers) if known else None


def _shard_plan(plans: Sequence[ShardPlan | None]) -> ShardPlan | None:
    """Return how the stages of a rank are gathered."""
    known = [plan for plan in plans if plan is not None]
    parameters = tuple(parameter for plan in known for parameter in plan.parameters)
    plain = sum(plan.in_high_precision for plan in known)
    return ShardPlan(ranks=known[0].ranks, parameters=parameters, in_high_precision=plain) if known else None
