"""`PipelinedTrainState`: a model whose blocks form stages on several ranks (`parallel.pipeline`).

The parts of a batch (`run.accumulate`) are the micro-batches. Only the rank of the last stage knows their losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from octavo.distributed import ShardPlan, TensorParallelPlan
from octavo.distributed.pipeline import SCHEDULES, Pipeline
from octavo.lab.models.llama import Llama
from octavo.lab.models.stages import Stage, stages
from octavo.lab.train.parallel import whole
from octavo.lab.train.sharding import make_reduction, shard_model, shard_tp
from octavo.lab.train.train_state import TrainState


class PipelinedTrainState(TrainState):
    """A model in training of which this rank has some stages; `model` contains them under the original names."""

    def _distribute(self, model: nn.Module) -> None:
        assert isinstance(model, Llama) and self.ranks.pipeline_group is not None  # ensured by `check_pipeline`
        self.context = None  # refused by `check_pipeline`
        parallel, schedule = self.ranks.parallel, SCHEDULES[self.ranks.parallel.schedule]
        stream = torch.bfloat16 if parallel.gather != "stored" else model.tok_embeddings.weight.dtype
        places = schedule.places(parallel.pipeline)
        parts = stages(model, len(places))
        table = [{"rank": place, "blocks": part.blocks} for place, part in zip(places, parts, strict=True)]
        self.pipeline = {"schedule": parallel.schedule, "activations": parallel.activations, "stages": table}
        own = {i: part for i, part in enumerate(parts) if places[i] == self.ranks.pipeline_rank}
        self.model = Stage(model, [block for part in own.values() for block in part.blocks])
        self.tensor_plan = _join_tensor_plans([shard_tp(self.ranks, part, sequence=False) for part in own.values()])
        self.reduction = make_reduction(self.ranks)
        sharded = [shard_model(self.ranks, part, self.reduction) for part in own.values()]
        self.shard_plan = _join_shard_plans(sharded)
        for part in own.values():  # around forward only: the schedule runs backward too
            autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)
            part.forward = autocast(part.forward)  # type: ignore[method-assign]
        self._run = Pipeline(
            own,
            schedule,
            self.ranks.pipeline_group,
            device=self.device,
            width=model.config.dim,
            stream=stream,
            sent="as is" if parallel.activations == "stored" else parallel.activations,
        )

    def holds(self, name: str) -> bool:
        """Return True if this rank has some of the tensor of this name in checkpoints."""
        kind, _, own = name.partition(".")
        while own and own not in self.parameters:
            own = own.rpartition(".")[0]
        return bool(own) or kind not in ("model", "optimizer", "reduction")

    def _forward_backward(self, inputs_BT: Tensor, targets_BT: Tensor, parts: int, *, is_scaled: bool = True) -> Tensor:
        if not torch.is_grad_enabled():
            return super()._forward_backward(inputs_BT, targets_BT, parts)
        scaled = self.loss_scale.scaled if is_scaled else lambda loss: loss
        with self._accumulating(parts):
            loss = self._run.step(inputs_BT, targets_BT, parts, scaled)
        return self.ranks.mean(torch.zeros((), device=self.device) if loss is None else loss)

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor, *, by_sequence: bool = False, **options: bool) -> Tensor:
        """Return the loss as `TrainState.loss` does, without gradients; zeros if another rank has the last stage."""
        loss = self._run.loss(inputs_BT, targets_BT, by_sequence=by_sequence)
        if loss is None:
            return torch.zeros(len(inputs_BT) if by_sequence else (), device=self.device)
        return loss if by_sequence else loss.sum()

    def _norm(self, gradients: Iterable[Tensor | None]) -> Tensor:
        return self.ranks.pipeline_norm(whole(super()._norm(gradients)).to(self.device))


def _join_tensor_plans(plans: Sequence[TensorParallelPlan | None]) -> TensorParallelPlan | None:
    """Return the tensor-parallel plan of all stages of a rank."""
    known = [plan for plan in plans if plan is not None]
    layers = tuple(layer for plan in known for layer in plan.layers)
    return TensorParallelPlan(ranks=known[0].ranks, sequence=False, layers=layers) if known else None


def _join_shard_plans(plans: Sequence[ShardPlan | None]) -> ShardPlan | None:
    """Return the sharding plan of all stages of a rank."""
    known = [plan for plan in plans if plan is not None]
    parameters = tuple(parameter for plan in known for parameter in plan.parameters)
    plain = sum(plan.in_high_precision for plan in known)
    return ShardPlan(ranks=known[0].ranks, parameters=parameters, in_high_precision=plain) if known else None
