"""Training by the `Trainer` of transformers, or one of TRL, in FP8: `Trainer(..., callbacks=[OctavoCallback()])`."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from octavo.conversion import Compiled, Plan, Policy, compile_blocks, convert
from octavo.errors import ConfigError
from octavo.integrations.full_masks import FullMarks, FullMaskDropper, mark_full_masks
from octavo.integrations.head_loss import fuse_head_and_loss
from octavo.integrations.recipe_switch import RecipeSwitch
from octavo.kernels import record
from octavo.kernels.runtime.ledger import Ledger, warn_once
from octavo.nn import reuse_weight_codes_per_step
from octavo.nn.step_codes import StepCodes
from octavo.recipes import RecipeLike


class OctavoCallback(TrainerCallback):
    """Conversion of the trained model, and a report of what ran in FP8.

    The model is converted when the trainer is made: before the optimizer, sharding, and `torch_compile`. Set
    `TrainingArguments(bf16=True)`. Checkpoints hold the model as it was, and `from_pretrained` loads them.

    Each log of the loss has three more values: `fp8_layers`; `fp8_gemms`, the FP8 GEMMs of the first step since the
    last log on this rank; and `fp8_fallbacks`, the number of reasons why any of these ran on a slow kernel, which the
    log of `octavo` names. In compiled training the last two are left out, unless `count=True`: steps that are counted
    are a second graph to compile.

    With `last_share` the last steps run by another recipe; a resumed run infers that from its step. A change that is
    impossible raises when training starts. Compiled code is compiled once more.

    With `compile` the repeated blocks are compiled (`octavo.compile`), in place of `torch_compile`. With either one the
    attention mask of a batch is left out where it masks nothing, which is checked on the host while the batch is
    collated; batches that are padded or packed keep theirs. At the end of training the model's own attention is back.

    A reference model that a trainer of TRL has made is not seen here: `octavo.integrations.trl.convert_reference`
    converts it alike, and a warning says so when training starts without.

    With `gradient_accumulation_steps` weights on a CPU are quantised once per optimizer step
    (`octavo.nn.reuse_weight_codes_per_step`), which takes memory for the codes: not with `Policy(memory="low")`, nor
    with `torch_compile` or DeepSpeed. On a GPU it would gain nothing yet.
    """

    plan: Plan | None = None
    """Conversion plan."""
    compiled: Compiled | None = None
    """What was compiled."""
    has_reference: bool = False
    """Whether the reference model of the trainer computes as the policy does."""

    def __init__(
        self,
        recipe: RecipeLike | None = None,
        policy: Policy | None = None,
        *,
        strict: bool = False,
        count: bool | None = None,
        last_share: float = 0.0,
        last_recipe: RecipeLike = "rowwise_bf16_fprop",
        compile: bool = False,
        fuse_loss: bool = False,
    ) -> None:
        """Take what `octavo.convert` takes, and options of a run.

        Args:
            count: whether GEMMs are counted; by default where nothing is compiled.
            last_share: share of the steps, at the end, by `last_recipe`: by default with fprop in BF16.
            compile: whether the repeated blocks are compiled.
            fuse_loss: whether the head computes the loss by chunks of tokens (`fuse_head_and_loss`), so that no logits
                are kept in training. Not for trainers that read them, as TRL's do.

        Raises:
            ConfigError: `last_share` is not between 0 and 1.
        """
        self.recipe, self.policy, self.strict, self.count = recipe, policy, strict, count
        self.switch = RecipeSwitch(last_share, last_recipe)
        self.compile, self.fuse_loss = compile, fuse_loss
        self._ledger: Ledger | None = None
        self._recording = ExitStack()
        self._converted: nn.Module | None = None
        self._prepared: nn.Module | None = None
        self._marks: FullMarks | None = None
        self._codes: StepCodes | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Convert the model, fuse its head and loss, and compile it.

        Raises:
            ConfigError: `compile` or `fuse_loss` with `torch_compile`.
            UnsupportedError: `fuse_loss` with a model whose loss is another.
        """
        if (self.compile or self.fuse_loss) and args.torch_compile:
            raise ConfigError(
                "OctavoCallback: compile and fuse_loss are for models that are not compiled as a whole. Leave out "
                "TrainingArguments(torch_compile): blocks take less time to compile."
            )
        if (model := given.get("model")) is not None:
            self._convert(model, args, self.recipe)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Convert a model that is not the one of `on_init_end`: of `model_init`, or of a callback that came later.

        Raises:
            ConfigError: `last_share` with weights stored in FP8, or a `last_recipe` that is unknown.
            UnsupportedError: the device cannot run it, or the model is sharded so that its recipe cannot change.
        """
        model: nn.Module = given["model"]
        self._close()  # of a training that failed
        self._recording.close()  # of a step that failed, as with auto_find_batch_size, or that was not logged
        self._ledger = None
        if self.switch.last_share:
            self.switch.rehearse(model, self.recipe, partial(self._convert, model, args))
        elif all(module is not self._converted for module in model.modules()):  # FSDP1 passes its wrapper here
            self._convert(model, args, self.recipe)
        if not self.has_reference and _needs_reference(model, args):
            warn_once(
                "OctavoCallback converted the policy, and cannot see its reference model. Unless that has the same "
                "recipe, the two differ before the first step by what FP8 rounds, so that margins do not start at 0: "
                "call octavo.integrations.trl.convert_reference(trainer) before trainer.train()"
            )
        if self.compile or args.torch_compile:
            self._leave_out_masks(model, given.get("train_dataloader"))
        is_low = self.policy is not None and self.policy.memory == "low"
        is_on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        if args.gradient_accumulation_steps > 1 and is_on_cpu and not (is_low or args.torch_compile or args.deepspeed):
            self._codes = reuse_weight_codes_per_step(model, given["optimizer"])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Begin the last share of the steps; count the GEMMs of this step, if it is the first since the last log."""
        if self.switch.is_due(state.global_step, state.max_steps):
            self._convert(given["model"], args, self.switch.last_recipe)
        is_compiled = self.compile or args.torch_compile
        if self._ledger is None and (not is_compiled if self.count is None else self.count):
            self._ledger = self._recording.enter_context(record())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Stop counting."""
        self._recording.close()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Stop counting, also where a step was not finished; the model has its own attention again."""
        self._recording.close()
        self._close()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Add what ran in FP8 to a log of the loss."""
        if self.plan is None or "loss" not in given.get("logs", {}):
            return
        counts = {"fp8_layers": self.plan.fp8_layers}
        if (seen := self._ledger) is not None:
            counts |= {"fp8_gemms": sum(seen.gemms.values()), "fp8_fallbacks": len(seen.fallbacks)}
        given["logs"].update(counts)
        if state.log_history:
            state.log_history[-1].update(counts)
        self._recording.close()
        self._ledger = None

    def _convert(self, model: nn.Module, args: TrainingArguments, recipe: RecipeLike | None) -> Plan:
        self.plan = convert(model, recipe, policy=self.policy, strict=self.strict, device=args.device)
        self._converted = model
        if self._prepared is None or all(module is not self._prepared for module in model.modules()):
            self._prepared = model
            if self.fuse_loss:
                fuse_head_and_loss(model)
            if self.compile:
                self.compiled = compile_blocks(model)
        return self.plan

    def _leave_out_masks(self, model: nn.Module, loader: Any) -> None:
        """Leave out the masks of batches that are neither padded nor packed."""
        self._marks = mark_full_masks(model)
        loader = getattr(loader, "base_dataloader", loader)  # Accelerate's contains PyTorch's
        if self._marks.covers(model) and isinstance(loader, DataLoader):
            loader.collate_fn = FullMaskDropper(loader.collate_fn)

    def _close(self) -> None:
        """Undo what holds for one training only."""
        for part in (self._marks, self._codes):
            if part is not None:
                part.remove()
        self._marks = self._codes = None


def _needs_reference(model: nn.Module, args: Any) -> bool:
    """Return whether a trainer of TRL with these arguments compares the policy with another model in each step."""
    if hasattr(model, "peft_config") or getattr(args, "precompute_ref_log_probs", False):
        return False  # the policy without its adapters, or the policy before the first step
    return hasattr(args, "sync_ref_model") and getattr(args, "beta", 0.0) != 0.0
