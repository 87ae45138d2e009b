"""`Muon`: hidden matrices step along their orthogonalised momentum, everything else by AdamW, in one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from octavo.errors import CheckpointError, ConfigError, UnsupportedError, did_you_mean
from octavo.kernels.coefficients import Own
from octavo.kernels.optimizer import COEFFICIENTS, Control, Layout, Slot, momentum, update
from octavo.optim import convert, orthogonal
from octavo.optim.optimizer import Entry, Optimizer
from octavo.optim.owners import Cut, cuts_of, to_parts, to_whole
from octavo.optim.states import RuleName, hidden_matrix

AdjustLr = Literal["original", "match_rms_adamw"]
CHUNK = 2**25
"""Elements that are orthogonalised at a time: enough to keep a GPU busy, and no more, as each takes some 8 bytes."""
_RULES = ("muon", "adamw")
_MUON_ONLY = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
_ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8}


class _Iteration(NamedTuple):
    """What matrices that are orthogonalised in one batch have in common."""

    shape: torch.Size
    """Of the part that this rank has."""
    cuts: tuple[Cut, ...]
    """How they lie on ranks; none: this rank has all of them."""
    nesterov: bool
    coefficients: tuple[float, float, float]
    steps: int
    eps: float


class Muon(Optimizer):
    """Muon (kellerjordan.github.io/posts/muon; at scale arXiv 2502.16982), as `torch.optim.Muon` computes it.

        m = momentum m + (1 - momentum) g;  u = momentum m + (1 - momentum) g, or m without nesterov
        w = w (1 - lr wd) - lr ratio NewtonSchulz(u)

    The momentum is stored as the tier stores a first moment; there is no second one. Matrices that are cut over
    ranks are orthogonalised whole, each by one of them (`owners`).

    Every group that is passed becomes up to two: `rule` is `muon` in the one, `adamw` in the other, and each has its
    learning rate for schedulers. A group's own settings hold for both; one that has the key `rule` is not split.

    Args:
        params: `model.named_parameters()`, or groups: names tell embeddings and heads from hidden matrices.
        lr: learning rate, a number or a tensor.
        weight_decay: decoupled.
        momentum: decay of the momentum.
        nesterov: look ahead by the gradient once more.
        ns_coefficients: a, b, c of Newton and Schulz's iteration.
        eps: least norm that a matrix is divided by.
        ns_steps: iterations.
        adjust_lr_fn: `match_rms_adamw`: ratio = 0.2 sqrt(max(R, C)), so that updates are as long as AdamW's, whose
            learning rate and decay then do; or `original` (None as well): ratio = sqrt(max(1, R / C)), with learning
            rates of about 0.02.
        adamw: settings of everything else: `lr`, `betas`, `eps`, `weight_decay`. By default `lr` and `weight_decay` of
            Muon, betas (0.9, 0.95), eps 1e-8.
        matrices: (name, parameter) -> whether Muon steps it; by default `octavo.optim.hidden_matrix`.
        settings: those of `Optimizer`.

    Raises:
        ConfigError: as `Optimizer` does; no names for the default of `matrices`; `original` without a learning rate for
            AdamW; or a parameter for Muon that is no matrix, or cut into uneven parts other than by rows, once.
    """

    rule = "muon"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = orthogonal.COEFFICIENTS,
        eps: float = orthogonal.EPS,
        ns_steps: int = orthogonal.STEPS,
        adjust_lr_fn: AdjustLr | None = "match_rms_adamw",
        *,
        adamw: Mapping[str, Any] | None = None,
        matrices: Callable[[str, Tensor], bool] = hidden_matrix,
        **settings: Any,
    ) -> None:
        self.matrices = matrices
        both = {"lr": lr, "weight_decay": weight_decay}
        own = {"momentum": momentum, "nesterov": nesterov, "ns_coefficients": tuple(ns_coefficients), "eps": eps}
        self._settings: dict[RuleName, dict[str, Any]] = {
            "muon": {**both, **own, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn},
            "adamw": {**both, **_ADAMW, **(adamw or {})},
        }
        self._lr_is_shared = "lr" not in (adamw or {})
        for name in adamw or {}:
            if name not in (*both, *_ADAMW):
                known = (*both, *_ADAMW)
                raise ConfigError(f"Muon adamw: unknown setting '{name}'.{did_you_mean(name, known)}")
        super().__init__(params, {}, **settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group: the part that Muon steps, and the part that AdamW steps."""
        if "rule" in param_group:
            if param_group["rule"] not in _RULES:
                raise ConfigError(f"Muon: the rule '{param_group['rule']}' of a group is neither muon nor adamw.")
            self._add(param_group["rule"], param_group)
            return
        parameters = param_group["params"]
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        chosen: dict[RuleName, list[Any]] = {"muon": [], "adamw": []}
        for one in parameters:
            name, parameter = one if isinstance(one, tuple) else ("", one)
            if not name and self.matrices is hidden_matrix and parameter.dim() == 2:
                raise ConfigError(
                    "Muon tells embeddings and heads from hidden matrices by their names: pass"
                    " model.named_parameters(), or groups with the key 'rule', 'muon' or 'adamw'."
                )
            chosen["muon" if self.matrices(name, parameter) else "adamw"].append(one)
        for rule, members in chosen.items():
            if members:
                self._add(rule, {**param_group, "params": members})

    def _add(self, rule: RuleName, group: dict[str, Any]) -> None:
        left_out = _MUON_ONLY if rule == "adamw" else ("betas",)
        given = {key: value for key, value in group.items() if key not in left_out}
        group = {**self._settings[rule], **given, "rule": rule}
        if rule == "adamw" and "lr" not in given and self._lr_is_shared:
            self._check_shared_lr()
        super().add_param_group(group)
        if rule == "muon":
            _check(self.param_groups[-1], [e for e in self.entries() if e.group == len(self.param_groups) - 1])

    def _check_shared_lr(self) -> None:
        if self._settings["muon"]["adjust_lr_fn"] != "match_rms_adamw":
            raise ConfigError(
                "Muon: with adjust_lr_fn 'original' its learning rate is some 50 times AdamW's. Give the rest its own,"
                " adamw={'lr': 3e-4}, or take 'match_rms_adamw'."
            )

    @torch.no_grad()
    def export_state_dict(self) -> dict[str, Any]:
        """Return `{"muon": ..., "adamw": ...}`: state dicts, in FP32, for `torch.optim.Muon` and `torch.optim.AdamW`.

        Each is of the groups of its rule alone, with its parameters numbered from 0.
        """
        return {rule: convert.export(self, self._groups_of(rule)) for rule in _RULES}

    @torch.no_grad()
    def import_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `export_state_dict` returned, or the state dicts of PyTorch's two optimizers under its keys.

        Raises:
            CheckpointError: it is of other keys, or does not fit.
        """
        if set(state_dict) != set(_RULES):
            raise CheckpointError(
                f"Muon: a state dict with the keys muon and adamw is needed, not {sorted(state_dict)}."
            )
        for rule in _RULES:
            convert.check_import(self, state_dict[rule], self._groups_of(rule))
        for rule in _RULES:
            convert.import_(self, state_dict[rule], self._groups_of(rule))

    def _groups_of(self, rule: str) -> list[int]:
        return [index for index, group in enumerate(self.param_groups) if group["rule"] == rule]

    def _settings_of(self, group: Mapping[str, Any]) -> Hashable:
        return super()._settings_of(group), group["rule"], group.get("adjust_lr_fn")

    def _own(self, entry: Entry, layout: Layout) -> Own:
        if self.rule_of(entry) != "muon":
            return super()._own(entry, layout)
        rows, cols = entry.parameter.shape
        if self.param_groups[entry.group]["adjust_lr_fn"] == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, cols))
        else:
            ratio = math.sqrt(max(1.0, rows / max(cols, 1)))
        return Own(entry.group, math.inf, ratio, averages=True)

    def _apply(self, slots: Sequence[Slot], layout: Layout, control: Control, entries: Sequence[Entry]) -> None:
        if layout.rule != "given":
            super()._apply(slots, layout, control, entries)
            return
        given = layout._replace(first=None, gradient=torch.bfloat16, gradient_scaling="none")
        rows = control.coefficients.clone()
        rows[:, COEFFICIENTS.index("factor")] = 1.0  # of gradients, not of updates
        ready = control._replace(coefficients=rows)
        for how, batch in self._batches(slots, entries):
            height = how.shape[0]
            updates = self._empty(len(batch), how)
            momentum(batch, layout, control, updates[:, :height].unbind(), self._uploads, nesterov=how.nesterov)
            whole = to_whole(updates, how.cuts)
            whole = orthogonal.orthogonalise(whole, coefficients=how.coefficients, steps=how.steps, eps=how.eps)
            updates = to_parts(whole, how.cuts, len(batch))
            made = zip(batch, updates[:, :height].unbind(), strict=True)
            update([_given(slot, one) for slot, one in made], given, ready, self._uploads)

    def _empty(self, count: int, how: _Iteration) -> Tensor:
        """Return memory for updates; of rows that a rank is short of, zeros."""
        height, cols = how.shape
        each = _filled_up(how)
        make = torch.empty if each == height else torch.zeros
        return make(count, each, cols, dtype=torch.bfloat16, device=self.device)

    def _batches(self, slots: Sequence[Slot], entries: Sequence[Entry]) -> Iterator[tuple[_Iteration, list[Slot]]]:
        """Yield matrices of one shape, `CHUNK` elements for a rank at a time, or one matrix that is larger."""
        alike: dict[_Iteration, list[Slot]] = {}
        for slot in slots:
            entry = entries[slot.row]
            group, cuts = self.param_groups[entry.group], cuts_of(entry.parameter)
            told = (group["nesterov"], group["ns_coefficients"], group["ns_steps"], group["eps"])
            alike.setdefault(_Iteration(slot.weight.shape, cuts, *told), []).append(slot)
        for how, members in alike.items():
            size = max(CHUNK // max(_filled_up(how) * how.shape[1], 1), 1)
            for start in range(0, len(members), size):
                yield how, members[start : start + size]


def _filled_up(how: _Iteration) -> int:
    """Return the rows of this rank, with those that it is short of where ranks have not the same number."""
    return next((cut.each for cut in how.cuts if cut.axis == 0), how.shape[0])


def _given(slot: Slot, made: Tensor) -> Slot:
    return slot._replace(gradient=made, gradient_scale=None, first=None, first_scale=None)


def _check(group: dict[str, Any], entries: Sequence[Entry]) -> None:
    for entry in entries:
        if entry.parameter.dim() != 2:
            raise ConfigError(
                f"Muon: parameter '{entry.name}' of shape {tuple(entry.parameter.shape)} is no matrix. Leave it to"
                " AdamW: say so in `matrices`."
            )
        try:
            cuts_of(entry.parameter)
        except UnsupportedError as error:
            raise ConfigError(
                f"Muon: parameter '{entry.name}': {error} Leave it to AdamW, or take ranks that divide it."
            ) from error
    if not 0 <= group["momentum"] < 1:
        raise ConfigError(f"Muon momentum: {group['momentum']} is not at least 0 and below 1.")
    if len(group["ns_coefficients"]) != 3 or not 0 < group["ns_steps"] < 100:
        raise ConfigError("Muon: ns_coefficients must be three numbers, and ns_steps at least 1 and below 100.")
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        near = did_you_mean(group["adjust_lr_fn"], ("original", "match_rms_adamw"))
        raise ConfigError(
            f"Muon adjust_lr_fn: '{group['adjust_lr_fn']}' is neither original nor match_rms_adamw.{near}"
        )
