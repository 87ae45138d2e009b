"""The base of the optimizers: a `torch.optim.Optimizer` whose state is kept as its tier says, stepped by one kernel.

Nothing in a step waits for the GPU. A step can be captured in a CUDA graph, after one that was not; there, let the
learning rate be a tensor on the GPU, as PyTorch's capturable optimizers have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError, did_you_mean
from octavo.kernels.optimizer import Control, Layout, Rule, Slot, squares, update
from octavo.kernels.uploads import Uploads
from octavo.optim import coefficients, convert
from octavo.optim.states import DEFAULT, States, keep_small, state_tensors, states_named
from octavo.optim.tensors import check, gradient_of, like, matrix_shape, slot_of, weight_dtype
from octavo.tensor import FP8Tensor

Keep = Callable[[str, Tensor], str | States | None]
"""(name, parameter) -> the tier of a parameter that is not to have its group's, or None."""


class Entry(NamedTuple):
    """A parameter among all."""

    number: int
    name: str
    parameter: Tensor
    group: int


class Optimizer(torch.optim.Optimizer):
    """What `AdamW`, `Adam` and `Lion` share.

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

    Attributes:
        grad_norm: global norm of the last step's gradient before clipping, FP32, shape (), on the device; None where
            neither clipping nor `skip_nonfinite` asked for it.
        skipped: int32 (1,), steps left out since the start; with `release`, parameters left out.
        clamped: int64 (1,), updates held at `max_update`.

    Raises:
        ConfigError: a setting out of range, an unknown tier, a parameter of a dtype that cannot be stepped, parameters
            on several devices, or `release` with a global `clip`.
    """

    rule: Rule = "adamw"

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
        self.clip = _limit("clip", clip)
        self.skip_nonfinite = skip_nonfinite
        self.max_update = max_update
        self.release = release
        self.grad_norm: Tensor | None = None
        self._step_supports_amp_scaling = True
        self._uploads = Uploads()
        self._hooks: list[Any] = []
        self._entries: list[Entry] = []
        self._slots: dict[int, tuple[Hashable, Layout, Slot]] = {}
        """Of each parameter, with what tells that its state lies elsewhere now."""
        super().__init__(params, {**defaults, "maximize": False, "clip": None, "states": states})
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
        _check_settings(group)
        for entry in self.entries():
            if entry.group == len(self.param_groups) - 1:
                check(entry.parameter, f"optimizer: parameter '{entry.name}'")
                if entry.parameter.device != self.device:
                    raise ConfigError(
                        f"optimizer: parameter '{entry.name}' is on {entry.parameter.device}, others on {self.device}."
                        " Make an optimizer for each device."
                    )
                if self.release and entry.parameter.requires_grad:
                    self._hooks.append(entry.parameter.register_post_accumulate_grad_hook(self._released(entry)))

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
        group = self.param_groups[entry.group]
        kept = self.keep(entry.name, entry.parameter) if group["keeps"] else None
        return states_named(group["states"] if kept is None else kept)

    def layout_of(self, entry: Entry, gradient: torch.dtype | None = None) -> Layout:
        """Return how a parameter and its state are laid out."""
        dtype = gradient or entry.parameter.dtype
        stochastic = self.rounding == "stochastic"
        return self.states_of(entry).layout(self.rule, weight_dtype(entry.parameter), dtype, stochastic)

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
        self._update([entry for entry in self.entries() if entry.parameter.grad is not None])
        return loss

    def report(self) -> dict[str, float]:
        """Return the bytes a parameter that weights, gradients and states take, by kind; counted in their tensors."""
        taken = dict.fromkeys(("weight", "gradient", "master", "first", "second"), 0)
        count = 0
        for entry in self.entries():
            parameter = entry.parameter
            count += parameter.numel()
            held = (parameter.codes, parameter.scale) if isinstance(parameter, FP8Tensor) else (parameter,)
            taken["weight"] += sum(map(_bytes, held))
            taken["gradient"] += 0 if parameter.grad is None else _bytes(parameter.grad)
            for name, tensor in self.state.get(parameter, {}).items():
                if name != "step":
                    taken[_KINDS[name.removesuffix("_scale")]] += _bytes(tensor)
        return {kind: size / count for kind, size in taken.items()} | {"total": sum(taken.values()) / count}

    def _released(self, entry: Entry) -> Callable[[Tensor], None]:
        def step_and_free(parameter: Tensor) -> None:
            # The group may have moved since; its number has not.
            self._update([entry])
            parameter.grad = None

        return step_and_free

    @torch.no_grad()
    def _update(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        grad_scale, found_inf = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        gradients = [gradient_of(e.parameter, e.name) for e in entries]
        placed = [self._slot(row, *pair) for row, pair in enumerate(zip(entries, gradients, strict=True))]
        numbers = tuple(entry.group for entry in entries)
        name = ("groups", entries[0].number)
        of_group = self._uploads(name, numbers, lambda: torch.tensor(numbers), self.device)
        hyper = coefficients.hyperparameters(self.param_groups, self._uploads, self.device)
        clips = self.clip is not None or any(group["clip"] is not None for group in self.param_groups)
        sums = squares(gradients, self._uploads) if clips or self.skip_nonfinite else None
        clipped = coefficients.clip(sums, of_group, hyper, limit=self.clip, grad_scale=grad_scale, found_inf=found_inf)
        self.grad_norm = clipped.norm
        limits = tuple(math.inf if layout.is_exact else self.max_update for layout, _ in placed)
        control = self._control(entries, hyper, of_group, clipped, limits)
        by_layout: dict[Layout, list[Slot]] = {}
        for layout, slot in placed:
            by_layout.setdefault(layout, []).append(slot)
        for layout, slots in by_layout.items():
            update(slots, layout, control, self._uploads)
        torch.autograd.graph.increment_version([e.parameter for e in entries if type(e.parameter) is not FP8Tensor])

    def _slot(self, row: int, entry: Entry, gradient: Tensor) -> tuple[Layout, Slot]:
        """Return how a parameter is laid out, and where it and its state lie: found again only where they moved."""
        group, parameter = self.param_groups[entry.group], entry.parameter
        state = self.prepare(entry)
        weight = parameter.codes if isinstance(parameter, FP8Tensor) else parameter
        places = (weight.data_ptr(), *(tensor.data_ptr() for tensor in state.values()))
        key = (gradient.dtype, self.rounding, id(self.keep), group["keeps"], group["states"], places)
        known = self._slots.get(entry.number)
        if known is None or known[0] != key:
            layout = self.layout_of(entry, gradient.dtype)
            known = key, layout, slot_of(row, entry.number, parameter, gradient, state, layout)
            self._slots[entry.number] = (key, layout, known[2]._replace(gradient=gradient.new_empty(0)))
        return known[1], known[2]._replace(row=row, gradient=gradient)

    def _control(
        self,
        entries: Sequence[Entry],
        hyper: Tensor,
        of_group: Tensor,
        clipped: coefficients.Clipped,
        limits: tuple[float, ...],
    ) -> Control:
        skip = clipped.skip.int().reshape(1)
        self.skipped += skip
        steps = [self.state[entry.parameter]["step"] for entry in entries]
        torch._foreach_add_(steps, 1.0 - clipped.skip.float())
        count = torch.stack(steps)
        name = ("bounds", entries[0].number)
        bounds = self._uploads(name, limits, lambda: torch.tensor(limits, dtype=torch.float64), self.device)
        rows = coefficients.table(self.rule, hyper, of_group, count.double(), clipped.factors, bounds)
        return Control(rows, count.int(), skip, self.clamped, self.seed)

    def prepare(self, entry: Entry) -> dict[str, Tensor]:
        """Return the state of a parameter; zeros, and the weight's own value as its master, where there is none yet."""
        parameter = entry.parameter
        if not self.state[parameter]:
            self.state[parameter].update(self.fresh(entry))
            self.initialise_master(entry)
        state: dict[str, Tensor] = self.state[parameter]
        return state

    def initialise_master(self, entry: Entry) -> None:
        """Let a master that is kept apart have the value of its weight."""
        if "master" in self.state[entry.parameter]:
            convert.set_master(self, entry, _value(entry.parameter))

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
        return [convert.master(self, e) if known else _value(e.parameter) for e, known in pairs]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as it is stored, tensors only, and the settings; see `flatten` for files without pickle."""
        return {**super().state_dict(), "seed": self.seed, "rounding": self.rounding, "rule": self.rule}

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
        """
        states_named(states)
        known = {e.number: convert.values(self, e) for e in self.entries() if self.state[e.parameter]}
        for group in self.param_groups:
            group["states"] = states
        for entry in self.entries():
            if entry.number in known:
                convert.set_values(self, entry, known[entry.number])


_KINDS = {"remainder": "master", "master": "master", "exp_avg": "first", "exp_avg_sq": "second"}


def _value(parameter: Tensor) -> Tensor:
    return parameter.dequantize(torch.float32) if isinstance(parameter, FP8Tensor) else parameter.detach().float()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _limit(name: str, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"optimizer {name}: {value} is not a positive number. None leaves gradients as they are.")
    return value


def _check_settings(group: dict[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ConfigError(f"optimizer lr: a tensor of shape {tuple(lr.shape)} is not one learning rate.")
    elif not 0 <= lr < math.inf:
        raise ConfigError(f"optimizer lr: {lr} is not at least 0.")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ConfigError(f"optimizer betas: {tuple(group['betas'])} must both be at least 0 and below 1.")
    for name in ("eps", "weight_decay"):
        if not 0 <= group.get(name, 0) < math.inf:
            raise ConfigError(f"optimizer {name}: {group[name]} is not at least 0.")
    _limit("clip", group["clip"])
