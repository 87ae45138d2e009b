"""The base of the optimizers: a `torch.optim.Optimizer` whose state is kept as its tier says, stepped by one kernel.

Nothing in a step waits for the GPU. A step can be captured in a CUDA graph, after one that was not; there, let the
learning rate be a tensor on the GPU, as PyTorch's capturable optimizers have it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError, UnsupportedError, did_you_mean
from octavo.kernels.coefficients import Own, Told, group_squares
from octavo.kernels.coefficients import coefficients as step_coefficients
from octavo.kernels.optimizer import Control, Layout, Slot, squares, update
from octavo.kernels.uploads import Uploads
from octavo.optim import coefficients, convert
from octavo.optim.gradients import Codes, Gradients, check_format
from octavo.optim.ranks import spread, sum_over_ranks
from octavo.optim.report import bytes_by_kind
from octavo.optim.settings import check_group, limit
from octavo.optim.states import DEFAULT, RuleName, States, keep_small, state_tensors, states_named
from octavo.optim.tensors import as_matrix, check, gradient_of, like, matrix_shape, slot_of, value_of, weight_dtype
from octavo.tensor import FP8Tensor, is_distributed, local

Keep = Callable[[str, Tensor], str | States | None]
"""(name, parameter) -> the tier of a parameter that is not to have its group's, or None."""


class Entry(NamedTuple):
    """A parameter among all."""

    number: int
    name: str
    parameter: Tensor
    group: int


class Placed(NamedTuple):
    """What is known of a parameter until its state lies elsewhere."""

    key: tuple[Any, ...]
    """What tells that it does."""
    layout: Layout
    own: Own
    slot: Slot
    """Without a gradient."""


class Optimizer(torch.optim.Optimizer):
    """What `AdamW`, `Adam`, `Lion` and `Muon` share.

    Settings beside theirs:

    states: the tier; see `octavo.optim.TIERS`. A parameter group may have its own, as the key `states`.
    keep: which parameters of groups without a tier of their own have another one; by default `keep_small`. It sees
        names where `model.named_parameters()` is passed, and numbers otherwise.
    rounding: how stored states are rounded: `stochastic`, or `nearest`, with which a second moment of few bits no
        longer follows a small change.
    seed: of stochastic rounding.
    clip: largest global norm of the gradient; a group may have a limit of its own, as the key `clip`.
    skip_nonfinite: leave everything as it is where a gradient is not finite; the search reads all gradients once.
    max_update: bound of |update|, in learning rates, where a moment is not FP32. Exact moments do not reach 10 with
        beta2 up to 0.999; a stored one that has lost its value could.
    release: step each parameter as soon as backward has its gradient, and free the gradient. `step` then steps what is
        left, and counts.
    gradients: `wide`, the dtype that backward makes them in; or `fp8`: as soon as backward has a parameter's gradient,
        it is stored as E4M3 codes with the scales of the tier, and `grad` is None again. Clipping and the search for
        overflows read the codes. Parameters that `keep` names stay wide. A group may have its own, as the key
        `gradients`. What reads `grad` sees no such gradient: clip by `clip`, not by `clip_grad_norm_`; a `GradScaler`
        is refused; and `DistributedDataParallel`, which reduces after the gradient is there, needs `accumulating`.

    Attributes:
        grad_norm: global norm of the last step's gradient before clipping, FP32, shape (), on the device; None where
            neither clipping nor `skip_nonfinite` asked for it.
        skipped: int32 (1,), steps left out since the start; with `release`, parameters left out.
        clamped: int64 (1,), updates held at `max_update`.

    Raises:
        ConfigError: a setting out of range, an unknown tier, a parameter of a dtype that cannot be stepped, parameters
            on several devices, or `release` with a global `clip` or with FP8 gradients.
    """

    rule: RuleName = "adamw"

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        states: str | States = DEFAULT,
        keep: Keep = keep_small,
        rounding: Literal["stochastic", "nearest"] = "stochastic",
        seed: int = 0,
        clip: float | None = None,
        skip_nonfinite: bool = True,
        max_update: float = 10.0,
        release: bool = False,
        gradients: Literal["wide", "fp8"] = "wide",
    ) -> None:
        if rounding not in ("stochastic", "nearest"):
            near = did_you_mean(rounding, ("stochastic", "nearest"))
            raise ConfigError(f"optimizer rounding: '{rounding}' is neither stochastic nor nearest.{near}")
        if release and clip is not None:
            raise ConfigError(
                "optimizer: release=True steps a parameter before the others have gradients, so the global norm that"
                " clip needs is not known. Give groups limits of one parameter each, or take release=False."
            )
        self.keep = keep
        self.rounding = rounding
        self.seed = seed
        self.clip = limit("clip", clip)
        self.skip_nonfinite = skip_nonfinite
        self.max_update = max_update
        self.release = release
        self.grad_norm: Tensor | None = None
        self.over_ranks: Callable[[Tensor], Tensor] | None = None
        """Sums the squares of gradients, FP64 (G,), over ranks that step other parameters (`GreedyZeRO`)."""
        self._step_supports_amp_scaling = True
        self._uploads = Uploads()
        self._hooks: list[Any] = []
        self._gradients = Gradients()
        self._accumulates = False
        self._entries: list[Entry] = []
        self._placed: dict[int, Placed] = {}
        self._layouts: dict[Layout, Layout] = {}
        """One object for all that are equal: they are told apart by it, as hashing each in every step takes long."""
        super().__init__(params, {**defaults, **_SHARED, "states": states, "gradients": gradients})
        self.skipped = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.clamped = torch.zeros(1, dtype=torch.int64, device=self.device)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        device: torch.device = self.param_groups[0]["params"][0].device
        return device

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. One that has `states` of its own has them for all its parameters: `keep` is not asked."""
        param_group["keeps"] = "states" not in param_group
        super().add_param_group(param_group)
        self._entries = []
        group = self.param_groups[-1]
        states_named(group["states"])
        check_format(group["gradients"])
        if self.release and group["gradients"] != "wide":
            raise ConfigError("optimizer: release=True frees every gradient at once: there is none to keep in FP8.")
        check_group(group)
        for entry in self.entries():
            if entry.group == len(self.param_groups) - 1:
                check(entry.parameter, f"optimizer: parameter '{entry.name}'")
                if entry.parameter.device != self.device:
                    raise ConfigError(
                        f"optimizer: parameter '{entry.name}' is on {entry.parameter.device}, others on {self.device}."
                        " Make an optimizer for each device."
                    )
                if (self.release or self.keeps_codes(entry)) and entry.parameter.requires_grad:
                    self._hooks.append(entry.parameter.register_post_accumulate_grad_hook(self._hook(entry)))

    def entries(self) -> list[Entry]:
        """Return all parameters in order, with their names, or their numbers where no names are known."""
        found = self._entries
        if found:
            return found
        for index, group in enumerate(self.param_groups):
            names = group.get("param_names") or [None] * len(group["params"])
            for name, parameter in zip(names, group["params"], strict=True):
                found.append(Entry(len(found), name or str(len(found)), parameter, index))
        return found

    def states_of(self, entry: Entry) -> States:
        """Return the tier of a parameter."""
        kept = self._kept(entry)
        return states_named(self.param_groups[entry.group]["states"] if kept is None else kept)

    def rule_of(self, entry: Entry) -> RuleName:
        """Return the rule of a parameter: that of its group, where a group has one."""
        rule: RuleName = self.param_groups[entry.group].get("rule", self.rule)
        return rule

    def keeps_codes(self, entry: Entry) -> bool:
        """Return whether the gradient of a parameter is kept as FP8 codes."""
        return self.param_groups[entry.group]["gradients"] == "fp8" and self._kept(entry) is None

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient that the next step takes of a parameter, FP32 where it is stored in FP8; or None."""
        entry = next((entry for entry in self.entries() if entry.parameter is parameter), None)
        codes = None if entry is None else self._gradients.get(entry.number)
        return parameter.grad if codes is None else codes.dequantize(parameter)

    @property
    def stored_gradients(self) -> dict[int, Codes]:
        """The gradients that are stored in FP8 now, by the numbers of their parameters.

        Set it, after `zero_grad`, to what it was when a CUDA graph of backward was captured: replays write there.
        """
        return self._gradients.all()

    @stored_gradients.setter
    def stored_gradients(self, gradients: Mapping[int, Codes]) -> None:
        self._gradients.put_back(gradients)

    def layout_of(self, entry: Entry, gradient: torch.dtype | None = None) -> Layout:
        """Return how a parameter and its state are laid out."""
        dtype = gradient or entry.parameter.dtype
        stochastic = self.rounding == "stochastic"
        return self.states_of(entry).layout(self.rule_of(entry), weight_dtype(entry.parameter), dtype, stochastic)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss and its gradients; called first.

        Raises:
            UnsupportedError: a gradient is sparse or of another dtype than FP32, BF16 and FP16.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._collect()
        self._update([e for e in self.entries() if e.parameter.grad is not None or self._gradients.get(e.number)])
        return loss

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Let the gradients of several backward passes add up, in their own dtype, before they are stored or released.

            with optimizer.accumulating():
                for part in parts:
                    loss(part).backward()
            optimizer.step()

        All passes of a step belong inside, the last one too. Without FP8 gradients or `release` it changes nothing.

        Raises:
            UnsupportedError: a gradient is stored already, of a backward pass before.
        """
        if self._accumulates:
            yield
            return
        if self._gradients:
            raise UnsupportedError(
                "optimizer.accumulating(): gradients of a backward pass before are stored in FP8, where adding would"
                " round. Call optimizer.zero_grad() after each step, and run all passes of a step inside."
            )
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False
        self._collect()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those in FP8 too.

        Args:
            set_to_none: free their memory; otherwise the next ones in FP8 are written where they were.
        """
        super().zero_grad(set_to_none)
        self._gradients.clear(keep_memory=not set_to_none)

    def report(self) -> dict[str, float]:
        """Return the bytes a parameter that weights, gradients and states take, by kind; counted in their tensors."""
        return bytes_by_kind(self, self._gradients)

    def _kept(self, entry: Entry) -> str | States | None:
        return self.keep(entry.name, entry.parameter) if self.param_groups[entry.group]["keeps"] else None

    def _hook(self, entry: Entry) -> Callable[[Tensor], None]:
        known = weakref.ref(self)  # so that an optimizer that is no more takes no gradients from the next one

        def ready(parameter: Tensor) -> None:
            optimizer = known()
            if optimizer is not None and not optimizer._accumulates:
                optimizer._take(entry)

        return ready

    def _collect(self) -> None:
        """Take the gradients that no hook has seen: those that added up, and those that were set by hand."""
        for entry in self.entries():
            if entry.parameter.grad is not None and (self.release or self.keeps_codes(entry)):
                self._take(entry)

    @torch.no_grad()
    def _take(self, entry: Entry) -> None:
        """Step a parameter whose gradient is there, or store the gradient; and free it."""
        if self.release:
            self._update([entry])
            entry.parameter.grad = None
        else:
            self._gradients.take(entry.number, entry.name, entry.parameter, self.states_of(entry).gradient)

    def _gradient(self, entry: Entry) -> tuple[Tensor, Tensor | None]:
        """Return a gradient as its matrix, and the scales of one that is stored."""
        codes = self._gradients.get(entry.number)
        if codes is None:
            return gradient_of(entry.parameter, entry.name), None
        return as_matrix(codes.codes, entry.parameter), codes.scale

    @torch.no_grad()
    def _update(self, entries: Sequence[Entry]) -> None:
        if not entries and (self.over_ranks is None or not self._needs_norm):
            return
        if self._gradients and getattr(self, "found_inf", None) is not None:
            raise UnsupportedError(_SCALED)
        settings = [self._settings_of(group) for group in self.param_groups]
        placed = [self._place(row, entry, settings[entry.group]) for row, entry in enumerate(entries)]
        control = self._control(entries, [slot for _, slot in placed], tuple(known.own for known, _ in placed))
        by_layout: dict[int, tuple[Layout, list[Slot]]] = {}
        for known, slot in placed:
            by_layout.setdefault(id(known.layout), (known.layout, []))[1].append(slot)
        for layout, slots in by_layout.values():
            self._apply(slots, layout, control, entries)
        torch.autograd.graph.increment_version([slot.weight for _, slot in placed if slot.weight_scale is None])

    @property
    def _needs_norm(self) -> bool:
        return self.skip_nonfinite or self.clip is not None or any(g["clip"] is not None for g in self.param_groups)

    def _apply(self, slots: Sequence[Slot], layout: Layout, control: Control, entries: Sequence[Entry]) -> None:
        """Step the parameters of a layout; `entries` are those of the rows of `control`."""
        update(slots, layout, control, self._uploads)

    def _settings_of(self, group: Mapping[str, Any]) -> Hashable:
        """Return what decides how parameters of a group are laid out, and what they have of their own."""
        return self.rounding, self.max_update, id(self.keep), group["keeps"], group["states"]

    def _own(self, entry: Entry, layout: Layout) -> Own:
        """Return what the coefficients of a parameter have that its group does not say."""
        return Own(entry.group, math.inf if layout.is_exact else self.max_update)

    def _place(self, row: int, entry: Entry, settings: Hashable) -> tuple[Placed, Slot]:
        """Return how a parameter is laid out, and where it and its state lie: found again only where they moved."""
        parameter, state = entry.parameter, self.prepare(entry)
        gradient, scale = self._gradient(entry)
        weight = local(parameter)
        weight = weight.codes if type(weight) is FP8Tensor else weight
        key = (gradient.dtype, settings, weight.data_ptr(), [t.data_ptr() for t in state.values()])
        known = self._placed.get(entry.number)
        if known is None or known.key != key:
            layout = self.layout_of(entry, gradient.dtype)
            layout = self._layouts.setdefault(layout, layout)
            slot = slot_of(row, entry.number, parameter, gradient.new_empty(0), state, layout)
            known = self._placed[entry.number] = Placed(key, layout, self._own(entry, layout), slot)
        return known, known.slot._replace(row=row, gradient=gradient, gradient_scale=scale)

    def _control(self, entries: Sequence[Entry], slots: Sequence[Slot], own: tuple[Own, ...]) -> Control:
        """Return what a step takes, from the gradients of all, and count it."""
        name = entries[0].number if entries else -1
        hyper = coefficients.hyperparameters(self.param_groups, self.clip, self._uploads, self.device)
        table = coefficients.of_parameters(own, self._uploads, name, self.device)
        sums = self._group_squares(entries, slots, table) if self._needs_norm else None
        amp = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        told = Told(hyper, table, sums, self.rule != "adam", **amp)
        counts = [self.state[entry.parameter]["step"] for entry in entries]
        made = step_coefficients(told, counts, self.skipped, self._uploads, name)
        self.grad_norm = made.norm
        return Control(made.coefficients, made.steps, made.skip, self.clamped, self.seed)

    def _group_squares(self, entries: Sequence[Entry], slots: Sequence[Slot], own: Tensor) -> Tensor:
        """Return the sums of the squares of each group's gradients, FP64 (G,), of all ranks."""
        sums = torch.zeros(0, dtype=torch.float64, device=self.device)
        if entries:
            sums = squares([slot.gradient for slot in slots], self._uploads, [slot.gradient_scale for slot in slots])
            sums = sum_over_ranks(sums, [e.parameter for e in entries], self._uploads, entries[0].number)
        sums = group_squares(sums, own, len(self.param_groups))
        return sums if self.over_ranks is None else self.over_ranks(sums)

    def prepare(self, entry: Entry) -> dict[str, Tensor]:
        """Return the state of a parameter; zeros, and the weight's own value as its master, where there is none yet."""
        state: dict[str, Tensor] = self.state[entry.parameter]
        if not state:
            state.update(self.fresh(entry))
            self.initialise_master(entry)
        return state

    def initialise_master(self, entry: Entry) -> None:
        """Let a master that is kept apart have the value of its weight."""
        if "master" in self.state[entry.parameter]:
            convert.set_master(self, entry, value_of(entry.parameter))

    def fresh(self, entry: Entry) -> dict[str, Tensor]:
        """Return the state of a parameter that has made no step, with nothing written into a master."""
        parameter = entry.parameter
        rows, cols = matrix_shape(parameter)
        state = {"step": torch.zeros((), device=parameter.device)}
        for name, (shape, dtype) in state_tensors(self.layout_of(entry), rows, cols).items():
            if name.endswith("_scale"):
                state[name] = torch.zeros(shape, dtype=dtype, device=parameter.device)
            else:
                state[name] = like(parameter, dtype)
        return state

    @torch.no_grad()
    def master_weights(self) -> list[Tensor]:
        """Return the FP32 value of every parameter, in order: that of its master, where it has made a step."""
        stepped = [bool(self.state[e.parameter]) for e in self.entries()]
        pairs = zip(self.entries(), stepped, strict=True)
        held = ((e, convert.master(self, e) if known else value_of(e.parameter)) for e, known in pairs)
        return [spread("master", value, entry.parameter) for entry, value in held]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as it is stored, tensors only, and the settings; see `flatten` for files without pickle."""
        packed = super().state_dict()
        sharded = {entry.number: entry.parameter for entry in self.entries() if is_distributed(entry.parameter)}
        for number, state in packed["state"].items():
            if number in sharded:
                packed["state"][number] = {name: spread(name, t, sharded[number]) for name, t in state.items()}
        return {**packed, "seed": self.seed, "rounding": self.rounding, "rule": self.rule}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned. Nothing is changed unless everything fits.

        Raises:
            CheckpointError: it is of another tier, rule or number of parameters, or a tensor has another shape.
        """
        convert.load(self, state_dict)

    @torch.no_grad()
    def export_state_dict(self) -> dict[str, Any]:
        """Return the state as `torch.optim.AdamW` (or `Adam`) loads it: `exp_avg` and `exp_avg_sq` in FP32, `step`.

        Masters are not in it: see `master_weights`.
        """
        return convert.export(self)

    @torch.no_grad()
    def import_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the moments, steps and settings of an exported state dict, or one of `torch.optim.AdamW`.

        Tiers stay those of this optimizer; moments are rounded to nearest.

        Raises:
            CheckpointError: it has another number of parameters, or a tensor has another shape.
        """
        convert.import_(self, state_dict)

    @torch.no_grad()
    def convert_states(self, states: str | States) -> None:
        """Keep the state of every group as another tier from now on, rounded to nearest; `keep` is asked as before.

        Raises:
            ConfigError: there is no such tier.
            UnsupportedError: there are gradients in FP8, stored as the tier of now has them.
        """
        states_named(states)
        if self._gradients:
            raise UnsupportedError(
                "optimizer.convert_states(): gradients are stored in FP8: step, then zero_grad(), first."
            )
        known = {e.number: convert.values(self, e) for e in self.entries() if self.state[e.parameter]}
        for group in self.param_groups:
            group["states"] = states
        for entry in self.entries():
            if entry.number in known:
                convert.set_values(self, entry, known[entry.number])


_SHARED = {"maximize": False, "clip": None}
"""Settings of every group."""
_SCALED = (
    "optimizer: a torch.amp.GradScaler cannot see gradients that are stored in FP8: it would neither unscale them nor"
    " find an overflow. Take gradients='wide' with it; or no scaler, as BF16 and FP32 need none. A constant scale of"
    " your own goes into optimizer.grad_scale, a tensor: the step divides by it, and skip_nonfinite sees overflows."
)
