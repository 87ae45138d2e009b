"""Base of the optimizers: a `torch.optim.Optimizer` whose states are stored by tier, stepped by one kernel.

A step never synchronises with the GPU. It can be captured in a CUDA graph after one eager step, with the learning rate
as a tensor on the GPU, as for PyTorch's capturable optimizers.

Separate masters follow weights that are written between eager steps, by `copy_` under `no_grad` or `weight.data = x`.
Writes in place through `weight.data` are not seen; those between replays are once `follow_writes` is called.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.coefficients import ParamSettings, StepInputs, coefficients, group_squares
from octavo.kernels.optimizer import Control, Layout, Slot, squares, update
from octavo.kernels.runtime.transfers import PinnedStaging
from octavo.optim import convert
from octavo.optim.gradients import GradientStore, StoredGradient
from octavo.optim.reducers import is_under_ddp
from octavo.optim.settings import OptimizerOptions, check_group, check_settings, group_table, largest_update
from octavo.optim.sharded import spread, sum_over_ranks
from octavo.optim.skips import SkipWatch
from octavo.optim.states import RuleName, States, kind_of, state_tensors, states_named
from octavo.optim.tensors import (
    as_matrix,
    check,
    count_writes,
    gradient_of,
    like_state,
    matrix_shape,
    slot_of,
    stored_weight,
    value_of,
)
from octavo.tensor import local, non_finite


class Entry(NamedTuple):
    """One parameter of the optimizer."""

    number: int
    name: str
    parameter: Tensor
    group: int


class CachedSlot(NamedTuple):
    """Layout and addresses of a parameter, valid until its memory moves."""

    key: tuple[Any, ...]
    """Changes when the memory or the settings change."""
    layout: Layout
    own: ParamSettings
    slot: Slot
    """Kernel arguments, without a gradient."""


class Optimizer(torch.optim.Optimizer):
    """Base of `AdamW`, `Adam`, `Lion` and `Muon`. Keyword arguments are the fields of `OptimizerOptions`.

    Attributes:
        grad_norm: global norm of the last step's gradient before clipping, FP32, shape (), on the device; None where
            neither clipping nor `skip_nonfinite` needs it.
        skipped: int32 (1,), number of skipped steps; with `release`, of skipped parameters. The first is warned of.
        skipped_in_a_row: number of the last steps that were skipped, as far as known without waiting for the device.
        clamped: int64 (1,), number of updates clamped to `max_update`.

    `copy.deepcopy` and `torch.save` work as for PyTorch's optimizers: copy the model in the same call.

    Raises:
        ConfigError: a setting unknown or out of range, an unknown tier, a parameter of an unsupported dtype, parameters
            on several devices, or `release` with a global `clip` or with FP8 gradients.
    """

    rule: RuleName = "adamw"
    _step_supports_amp_scaling = True

    def __init__(self, params: Any, defaults: dict[str, Any], **settings: Any) -> None:
        check_settings(settings, defaults)
        options = OptimizerOptions(**settings)
        self.keep, self.rounding, self.seed = options.keep, options.rounding, options.seed
        self.clip, self.skip_nonfinite, self.max_update = options.clip, options.skip_nonfinite, options.max_update
        self.release, self.max_skips = options.release, options.max_skips
        self.grad_norm: Tensor | None = None
        self.over_ranks: Callable[[Tensor], Tensor] | None = None
        """Sums squares of gradients, FP64 (G,), over ranks that step other parameters (`GreedyZeRO`)."""
        self._gradients = GradientStore()
        self._start()
        shared = {"maximize": False, "clip": None, "states": options.states, "gradients": options.gradients}
        super().__init__(params, {**defaults, **shared})
        self.skipped = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.clamped = torch.zeros(1, dtype=torch.int64, device=self.device)

    def _start(self) -> None:
        """Set what belongs to this object alone, and is not copied with it."""
        self._uploads = PinnedStaging()
        self._skips = SkipWatch()
        self._accumulates = False
        self._may_take = False
        """Whether no reducer was found that hooks would come before."""
        self._released: set[int] = set()
        """Parameters that backward has stepped since the last `step`."""
        self._entries: list[Entry] = []
        self._placed: dict[int, CachedSlot] = {}
        self._versions: dict[int, tuple[int, StorageWeakRef]] = {}
        """Version and storage of each weight that has a separate master, when the two were last known to agree."""
        self._layouts: dict[Layout, Layout] = {}
        """Interned layouts, compared by identity: hashing each one in every step is slow."""

    def __getstate__(self) -> dict[str, Any]:
        if self.over_ranks is not None:
            raise UnsupportedError(
                "optimizer: it steps the parameters of one rank for a GreedyZeRO, and cannot be copied or pickled. Make"
                " a new optimizer for the other model, and load the state dict of this one."
            )
        self.follow_writes(self.entries())
        return {**super().__getstate__(), **{name: vars(self)[name] for name in _COPIED if name in vars(self)}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.over_ranks = None
        self._start()
        self.max_skips = getattr(self, "max_skips", None)  # a pickle of an older version has none
        self._skips = SkipWatch(int(self.skipped))
        self._register_hooks(self.entries())
        self.record_versions(entry for entry in self.entries() if "master" in self.state.get(entry.parameter, ()))

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        device: torch.device = self.param_groups[0]["params"][0].device
        return device

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. The `states` of a group apply to all its parameters, without asking `keep`."""
        # A copy, as the dict is the caller's; one of `param_groups` has settings filled in, and knows whether it keeps.
        super().add_param_group({"keeps": "states" not in param_group, **param_group})
        group = self.param_groups[-1]
        states_named(group["states"])
        check_group(group, self.rule, self._known_settings(group))
        if self.release and group["gradients"] != "wide":
            raise ConfigError("optimizer: release=True frees every gradient at once: none is left to store in FP8.")
        entries = [entry for entry in self.entries() if entry.group == len(self.param_groups) - 1]
        for entry in entries:
            check(entry.parameter, f"optimizer: parameter '{entry.name}'")
            if entry.parameter.device != self.device:
                raise ConfigError(
                    f"optimizer: parameter '{entry.name}' is on {entry.parameter.device}, others on {self.device}."
                    " Make an optimizer for each device."
                )
        self._register_hooks(entries)

    def _known_settings(self, group: Mapping[str, Any]) -> Collection[str]:
        """Return the settings that a group may have."""
        return self.defaults

    def _register_hooks(self, entries: Iterable[Entry]) -> None:
        """Register the hooks that take gradients in backward, where settings ask for it."""
        for entry in entries:
            if (self.release or self.keeps_codes(entry)) and entry.parameter.requires_grad:
                entry.parameter.register_post_accumulate_grad_hook(self._hook(entry))

    def entries(self) -> list[Entry]:
        """Return all parameters in order, with their names, or numbers where names are not known."""
        known, here = self._entries, [(p, i) for i, group in enumerate(self.param_groups) for p in group["params"]]
        pairs = zip(known, here, strict=False)
        same = len(known) <= len(here) and all(e.parameter is p and e.group == i for e, (p, i) in pairs)
        if same and len(known) == len(here):
            return known
        if not same and (self.release or any(group["gradients"] == "fp8" for group in self.param_groups)):
            raise UnsupportedError(
                "optimizer: the parameters of its groups were replaced, but hooks on the original parameters store or"
                " release their gradients. Make a new optimizer and load the state of this one."
            )
        if not same:
            self._placed, self._versions = {}, {}
        self._entries = []
        for index, group in enumerate(self.param_groups):
            names = group.get("param_names") or [None] * len(group["params"])
            for name, parameter in zip(names, group["params"], strict=True):
                number = len(self._entries)
                self._entries.append(Entry(number, name or str(number), parameter, index))
        return self._entries

    def states_of(self, entry: Entry) -> States:
        """Return the tier of a parameter."""
        kept = self._kept(entry)
        return states_named(self.param_groups[entry.group]["states"] if kept is None else kept)

    def rule_of(self, entry: Entry) -> RuleName:
        """Return the update rule of a parameter: that of its group, if it has one."""
        rule: RuleName = self.param_groups[entry.group].get("rule", self.rule)
        return rule

    def keeps_codes(self, entry: Entry) -> bool:
        """Return whether the gradient of a parameter is stored as FP8 codes."""
        return self.param_groups[entry.group]["gradients"] == "fp8" and self._kept(entry) is None

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient of a parameter that the next step uses, dequantised to FP32 if stored in FP8; or None."""
        return next(self.gradients([parameter]))

    def gradients(self, parameters: Iterable[Tensor]) -> Iterator[Tensor | None]:
        """Yield `gradient` of each parameter; all of them take the time of one."""
        numbers = {id(entry.parameter): entry.number for entry in self.entries()}
        for parameter in parameters:
            codes = self._gradients.stored.get(numbers.get(id(parameter), -1))
            yield parameter.grad if codes is None else codes.dequantize(parameter)

    @property
    def stored_gradients(self) -> dict[int, StoredGradient]:
        """The gradients stored in FP8, by parameter number.

        After `zero_grad`, set it to its value at the capture of a CUDA graph of backward: replays write there.
        """
        return dict(self._gradients.stored)

    @stored_gradients.setter
    def stored_gradients(self, gradients: Mapping[int, StoredGradient]) -> None:
        self._gradients.stored = dict(gradients)

    def layout_of(self, entry: Entry, gradient: torch.dtype | None = None) -> Layout:
        """Return the layout of a parameter and its state."""
        weight, stochastic = stored_weight(entry.parameter).dtype, self.rounding == "stochastic"
        return self.states_of(entry).layout(self.rule_of(entry), weight, gradient or entry.parameter.dtype, stochastic)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss and its gradients; called first.

        Raises:
            UnsupportedError: a gradient is sparse or of another dtype than FP32, BF16 and FP16; a parameter has changed
                its dtype or shape since its state was made; or gradients were taken in backward that a `GradScaler` or
                `DistributedDataParallel` should have seen first.
            NonFiniteError: `max_skips` steps in a row were skipped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.release and getattr(self, "found_inf", None) is not None:
            raise UnsupportedError(_RELEASED_SCALED)
        self._collect()
        self._update([e for e in self.entries() if e.parameter.grad is not None or e.number in self._gradients.stored])
        if self._needs_norm:
            is_routine = getattr(self, "found_inf", None) is not None
            self._skips.after_step(self.skipped, self.max_skips, is_routine, self._not_finite)
        return loss

    @property
    def skipped_in_a_row(self) -> int:
        """Number of the last steps that were skipped, as far as known without waiting for the device."""
        return self._skips.in_a_row

    @torch.no_grad()
    def _not_finite(self) -> Iterator[str]:
        """Yield the names of the parameters whose gradients are not finite. Waits for the device."""
        entries = self.entries()
        gradients = self.gradients(entry.parameter for entry in entries)
        for entry, gradient in zip(entries, gradients, strict=True):
            if gradient is not None and bool(non_finite(gradient)):
                yield entry.name

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate the gradients of several backward passes, in their own dtype, before they are stored or released.

            with optimizer.accumulating():
                for part in parts:
                    loss(part).backward()
            optimizer.step()

        All passes of a step belong inside, including the last. No effect without FP8 gradients or `release`.

        Raises:
            UnsupportedError: a gradient of an earlier backward pass is stored already.
        """
        if self._accumulates:
            yield
            return
        if self._gradients.stored:
            raise UnsupportedError(
                "optimizer.accumulating(): gradients of an earlier backward pass are stored in FP8, where accumulation"
                " would round. Call optimizer.zero_grad() after each step, and run all passes of a step inside."
            )
        self._refuse_returned()
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False
        self._collect()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, including those stored in FP8.

        Args:
            set_to_none: free their memory; otherwise the next FP8 gradients reuse it.
        """
        self._refuse_returned()
        super().zero_grad(set_to_none)
        self._gradients.clear(keep_memory=not set_to_none)

    def report(self) -> dict[str, float]:
        """Return the bytes per parameter of weights, gradients and states, by kind, counted in their tensors."""
        taken = dict.fromkeys(("weight", "gradient", "master", "first", "second"), 0)
        count = 0
        for entry in self.entries():
            parameter, weight = entry.parameter, local(entry.parameter)
            count += weight.numel()
            taken["weight"] += weight.nbytes
            taken["gradient"] += sum(part.nbytes for part in self._gradients.stored.get(entry.number, ()))
            taken["gradient"] += 0 if parameter.grad is None else local(parameter.grad).nbytes
            for name, tensor in self.state.get(parameter, {}).items():
                if name != "step":
                    taken[kind_of(name)] += tensor.nbytes
        return {kind: size / count for kind, size in taken.items()} | {"total": sum(taken.values()) / count}

    def _kept(self, entry: Entry) -> str | States | None:
        return self.keep(entry.name, entry.parameter) if self.param_groups[entry.group]["keeps"] else None

    def _hook(self, entry: Entry) -> Callable[[Tensor], None]:
        known = weakref.ref(self)  # a deleted optimizer must not take gradients from its successor

        def ready(parameter: Tensor) -> None:
            optimizer = known()
            if optimizer is not None and not optimizer._accumulates:
                optimizer._refuse_ddp()
                optimizer._take(entry)
                if optimizer.release:
                    optimizer._released.add(entry.number)

        return ready

    def _refuse_ddp(self) -> None:
        """Refuse to take gradients that are to be reduced; searched for once, when the first is taken."""
        if self._may_take:
            return
        if is_under_ddp(e.parameter for e in self.entries() if self.release or self.keeps_codes(e)):
            taken = "release=True steps a parameter" if self.release else "gradients='fp8' stores a gradient"
            raise UnsupportedError(
                f"optimizer: {taken} in backward, before DistributedDataParallel has reduced the gradient: each rank"
                " would step on its own. Run all forward and backward passes of a step in `with"
                " optimizer.accumulating():`, at the end of which the reduced gradients are taken."
            )
        self._may_take = True

    def _refuse_returned(self) -> None:
        """Refuse gradients that were written after `release` has stepped their parameters, then forget the latter.

        So do reducers that `_refuse_ddp` does not find.
        """
        for entry in self.entries() if self._released else ():
            if entry.number in self._released and entry.parameter.grad is not None:
                raise UnsupportedError(
                    f"optimizer: parameter '{entry.name}' has a gradient again, after release=True has stepped it in"
                    " backward. DistributedDataParallel and other reducers write one when they have reduced gradients:"
                    " each rank has stepped on its own, and their weights differ. Run backward in `with"
                    " optimizer.accumulating():`, and start again from equal weights. Before setting one, call step()."
                )
        self._released.clear()

    def _collect(self) -> None:
        """Take the gradients that no hook has seen: accumulated ones, and those set by hand."""
        self._refuse_returned()
        for entry in self.entries():
            if entry.parameter.grad is not None and (self.release or self.keeps_codes(entry)):
                self._take(entry)

    @torch.no_grad()
    def _take(self, entry: Entry) -> None:
        """Step a parameter whose gradient is complete, or store the gradient; then free it."""
        if self.release:
            self._update([entry])
            entry.parameter.grad = None
        else:
            self._gradients.take(entry.number, entry.name, entry.parameter, self.states_of(entry).gradient)

    def _gradient(self, entry: Entry) -> tuple[Tensor, Tensor | None]:
        """Return a gradient as a matrix, and its scales if it is stored in FP8."""
        codes = self._gradients.stored.get(entry.number)
        if codes is None:
            return gradient_of(entry.parameter, entry.name), None
        return as_matrix(codes.codes, entry.parameter), codes.scale

    @torch.no_grad()
    def _update(self, entries: Sequence[Entry]) -> None:
        if not entries and (self.over_ranks is None or not self._needs_norm):
            return
        if self._gradients.stored and getattr(self, "found_inf", None) is not None:
            raise UnsupportedError(_SCALED)
        self.follow_writes(entries)
        settings = [self._settings_of(group) for group in self.param_groups]
        placed = [self._place(row, entry, settings[entry.group]) for row, entry in enumerate(entries)]
        control = self._control(entries, [slot for _, slot in placed], tuple(known.own for known, _ in placed))
        by_layout: dict[int, tuple[Layout, list[Slot]]] = {}
        for known, slot in placed:
            by_layout.setdefault(id(known.layout), (known.layout, []))[1].append(slot)
        for layout, slots in by_layout.values():
            self._apply(slots, layout, control, entries)
        count_writes(entry.parameter for entry in entries)
        self.record_versions(
            e for e, (known, _) in zip(entries, placed, strict=True) if known.layout.master is not None
        )

    def record_versions(self, entries: Iterable[Entry]) -> None:
        """Record the versions of weights whose separate masters agree with them now."""
        self._versions |= {entry.number: _version(entry.parameter) for entry in entries}

    @torch.no_grad()
    def follow_writes(self, entries: Iterable[Entry]) -> None:
        """Update separate masters whose weights were written since the two agreed, by a checkpoint or by hand.

        Called before each eager step, and before masters are read. A write in place through `weight.data`, or through
        NumPy, is not seen: PyTorch counts none, and comparing values would read all weights in every step.
        """
        for entry in entries if self._versions else ():
            version = _version(entry.parameter)
            if self._versions.get(entry.number, version) != version and "master" in self.state[entry.parameter]:
                convert.follow_weight(self, entry)
                self.record_versions([entry])

    @property
    def _needs_norm(self) -> bool:
        return self.skip_nonfinite or self.clip is not None or any(g["clip"] is not None for g in self.param_groups)

    def _apply(self, slots: Sequence[Slot], layout: Layout, control: Control, entries: Sequence[Entry]) -> None:
        """Step the parameters of one layout; `entries` correspond to the rows of `control`."""
        update(slots, layout, control, self._uploads)

    def _settings_of(self, group: Mapping[str, Any]) -> Hashable:
        """Return the settings that determine layouts and `ParamSettings` of a group."""
        return (
            self.rounding,
            self.max_update,
            tuple(group.get("betas", ())),
            id(self.keep),
            group["keeps"],
            group["states"],
        )

    def _own(self, entry: Entry, layout: Layout) -> ParamSettings:
        """Return the settings of a parameter beyond those of its group."""
        if layout.is_exact:
            return ParamSettings(entry.group, math.inf)
        betas = self.param_groups[entry.group].get("betas")
        return ParamSettings(entry.group, largest_update(betas) if self.max_update is None else self.max_update)

    def _place(self, row: int, entry: Entry, settings: Hashable) -> tuple[CachedSlot, Slot]:
        """Return the layout and the kernel arguments of a parameter, cached until its memory moves."""
        parameter, state = entry.parameter, self.prepare(entry)
        gradient, scale = self._gradient(entry)
        key = (gradient.dtype, settings, stored_weight(parameter).data_ptr(), [t.data_ptr() for t in state.values()])
        known = self._placed.get(entry.number)
        if known is None or known.key != key:
            convert.check_form(self, entry)
            layout = self.layout_of(entry, gradient.dtype)
            layout = self._layouts.setdefault(layout, layout)
            slot = slot_of(row, entry.number, parameter, gradient.new_empty(0), state, layout)
            known = self._placed[entry.number] = CachedSlot(key, layout, self._own(entry, layout), slot)
        return known, known.slot._replace(row=row, gradient=gradient, gradient_scale=scale)

    def _control(self, entries: Sequence[Entry], slots: Sequence[Slot], own: tuple[ParamSettings, ...]) -> Control:
        """Return the control values of a step, from all gradients, and count the step."""
        name = entries[0].number if entries else -1
        hyper = group_table(self.param_groups, self.clip, self._uploads, self.device)
        size, staged = (len(own), len(ParamSettings._fields)), ("own", name)
        table = self._uploads(staged, own, lambda: torch.tensor(own, dtype=torch.float64).view(size), self.device)
        sums = self._group_squares(entries, slots, table) if self._needs_norm else None
        amp = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        inputs = StepInputs(hyper, table, sums, self.rule != "adam", **amp)
        counts = [self.state[entry.parameter]["step"] for entry in entries]
        found = coefficients(inputs, counts, self.skipped, self._uploads, name)
        self.grad_norm = found.norm
        return Control(found.coefficients, found.steps, found.skip, self.clamped, self.seed)

    def _group_squares(self, entries: Sequence[Entry], slots: Sequence[Slot], own: Tensor) -> Tensor:
        """Return the sum of squares of each group's gradients over all ranks, FP64 (G,)."""
        sums = torch.zeros(0, dtype=torch.float64, device=self.device)
        if entries:
            sums = squares([slot.gradient for slot in slots], self._uploads, [slot.gradient_scale for slot in slots])
            sums = sum_over_ranks(sums, [e.parameter for e in entries], self._uploads, entries[0].number)
        sums = group_squares(sums, own, len(self.param_groups))
        return sums if self.over_ranks is None else self.over_ranks(sums)

    def prepare(self, entry: Entry) -> dict[str, Tensor]:
        """Return the state of a parameter; where it has none yet, zeros, and the weight's value as its master."""
        state: dict[str, Tensor] = self.state[entry.parameter]
        if not state:
            state.update(self.fresh(entry))
            self.initialise_master(entry)
        return state

    def forget(self, entries: Iterable[Entry]) -> None:
        """Drop the states of parameters: their next step is their first."""
        for entry in entries:
            self.state.pop(entry.parameter, None)
            self._versions.pop(entry.number, None)
            self._placed.pop(entry.number, None)

    def initialise_master(self, entry: Entry) -> None:
        """Set a separate master to the value of its weight."""
        if "master" in self.state[entry.parameter]:
            convert.set_master(self, entry, value_of(entry.parameter))

    def form(self, entry: Entry) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each state tensor of a parameter."""
        parts = state_tensors(self.layout_of(entry), *matrix_shape(entry.parameter))
        whole = tuple(local(entry.parameter).shape)
        tensors = {name: (size if name.endswith("_scale") else whole, dtype) for name, (size, dtype) in parts.items()}
        return {"step": ((), torch.float32), **tensors}

    def fresh(self, entry: Entry) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step, with the master not initialised."""
        return {name: like_state(name, *form, entry.parameter) for name, form in self.form(entry).items()}

    @torch.no_grad()
    def master_weights(self) -> list[Tensor]:
        """Return the FP32 value of every parameter, in order: that of its master, once it has made a step."""
        held = [convert.master(self, e) if self.state[e.parameter] else value_of(e.parameter) for e in self.entries()]
        return [spread("master", value, e.parameter) for e, value in zip(self.entries(), held, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return the stored state, tensors only, and the settings; see `flatten` for files without pickle.

        Moments stored as codes are named `exp_avg_codes` and `exp_avg_sq_codes`: PyTorch's optimizers do not load them.
        `export_state_dict` returns what they load.
        """
        self.follow_writes(self.entries())
        packed, entries = super().state_dict(), self.entries()
        for number, state in packed["state"].items():
            entry = entries[number]
            state = {name: spread(name, tensor, entry.parameter) for name, tensor in state.items()}
            packed["state"][number] = convert.with_saved_names(self, entry, state)
        return {**packed, "seed": self.seed, "rounding": self.rounding, "rule": self.rule}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, in place of all states. Nothing is changed unless everything fits.

        Parameters are matched by name, in any order, where both optimizers were given `model.named_parameters()`,
        otherwise by position.

        Raises:
            CheckpointError: tier, rule, number or names of parameters, or a tensor's shape differ.
        """
        convert.load(self, state_dict)

    @torch.no_grad()
    def export_state_dict(self) -> dict[str, Any]:
        """Return the state in the format of `torch.optim.AdamW` (or `Adam`): FP32 `exp_avg` and `exp_avg_sq`, `step`.

        Masters are not included: see `master_weights`.
        """
        return convert.export(self, range(len(self.param_groups)))

    @torch.no_grad()
    def import_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Import moments, steps and settings of an exported state dict, or of one of `torch.optim.AdamW`.

        Tiers stay those of this optimizer; moments are rounded to nearest. A parameter without a state there has none
        afterwards; a master is kept otherwise. Parameters are matched as by `load_state_dict`.

        Raises:
            CheckpointError: the number or names of parameters, or a tensor's shape differ.
        """
        convert.import_(self, state_dict, range(len(self.param_groups)))

    @torch.no_grad()
    def convert_states(self, states: str | States) -> None:
        """Convert the state of every group to another tier, rounding to nearest; `keep` still applies.

        Raises:
            ConfigError: there is no such tier.
            UnsupportedError: gradients are stored in FP8, in the format of the current tier.
        """
        states_named(states)
        if self._gradients.stored:
            raise UnsupportedError(
                "optimizer.convert_states(): gradients are stored in FP8: step, then zero_grad(), first."
            )
        known = {e.number: convert.values(self, e) for e in self.entries() if self.state[e.parameter]}
        self._versions = {}
        for group in self.param_groups:
            group["states"] = states
        for entry in self.entries():
            if entry.number in known:
                convert.set_values(self, entry, known[entry.number])


def _version(parameter: Tensor) -> tuple[int, StorageWeakRef]:
    """Return a key that changes with each write to a parameter, or to the tensor that stores it.

    `parameter.data = x` leaves the version as it is and changes the storage. The weak reference keeps no memory alive,
    and equals no later storage, even one at the same address.
    """
    stored = stored_weight(parameter)
    return parameter._version + stored._version, StorageWeakRef(stored.untyped_storage())


_COPIED = (
    *("keep", "rounding", "seed", "clip", "skip_nonfinite", "max_update", "release", "grad_norm", "skipped", "clamped"),
    *("max_skips", "grad_scale", "_gradients"),
)
"""Attributes that a copy or a pickle has, beside PyTorch's."""
_RELEASED_SCALED = (
    "optimizer: release=True has stepped the weights in backward, on gradients that a torch.amp.GradScaler had yet to"
    " unscale and to search for overflows: this step's weights are wrong. Take release=False with it; or no scaler, as"
    " BF16 and FP32 need none. For a constant loss scale set optimizer.grad_scale, a tensor: the step divides by it."
)
_SCALED = (
    "optimizer: a torch.amp.GradScaler cannot see gradients that are stored in FP8: it would neither unscale them nor"
    " find an overflow. Take gradients='wide' with it; or no scaler, as BF16 and FP32 need none. For a constant loss"
    " scale set optimizer.grad_scale, a tensor: the step divides by it, and skip_nonfinite detects overflows."
)
