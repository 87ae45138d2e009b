"""`Muon`: orthogonalised momentum for hidden matrices, AdamW for everything else, in one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import CheckpointError, ConfigError, UnsupportedError, did_you_mean
from octavo.kernels.coefficients import ParamSettings
from octavo.kernels.optimizer import COEFFICIENTS, Control, Layout, Slot, momentum, update
from octavo.kernels.storage.reference import LEAST_DIVISOR
from octavo.optim import convert
from octavo.optim.matrix_all_to_all import ShardLayout, gather_full, scatter_full, shard_layouts
from octavo.optim.optimizer import Entry, Optimizer
from octavo.optim.settings import check_settings
from octavo.optim.states import RuleName, hidden_matrix

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Quintic Newton-Schulz iteration with a steep slope at zero: singular values end between about 0.7 and 1.2.

Source: kellerjordan.github.io/posts/muon."""
NS_STEPS = 5
NS_EPS = 1e-7
CHUNK = 2**25
"""Elements orthogonalised at a time: enough to keep a GPU busy, and no more, since each needs about 8 bytes."""
_RULES = ("muon", "adamw")
_MUON = {
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": NS_COEFFICIENTS,
    "eps": NS_EPS,
    "ns_steps": NS_STEPS,
    "adjust_lr_fn": "match_rms_adamw",
}
_ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8}


class _BatchKey(NamedTuple):
    """Properties shared by matrices that are orthogonalised in one batch."""

    shape: torch.Size
    """Shape of this rank's shard."""
    layouts: tuple[ShardLayout, ...]
    """Sharding; empty: this rank has all of them."""
    nesterov: bool
    coefficients: tuple[float, float, float]
    steps: int
    eps: float

    @property
    def padded_rows(self) -> int:
        """Rows per rank, padding included where rows are sharded unevenly."""
        return next((layout.each for layout in self.layouts if layout.axis == 0), self.shape[0])


class Muon(Optimizer):
    """Muon (kellerjordan.github.io/posts/muon; at scale arXiv 2502.16982), as `torch.optim.Muon` computes it.

        m = momentum m + (1 - momentum) g;  u = momentum m + (1 - momentum) g, or m without nesterov
        w = w (1 - lr wd) - lr ratio NewtonSchulz(u)

    The momentum is stored like the tier's first moment; there is no second one. Sharded matrices are orthogonalised
    whole, each on one rank (`matrix_all_to_all`).

    Each group passed is split in up to two, with `rule` `muon` and `adamw`, each with its own learning rate for
    schedulers. A group's settings apply to both; a group with the key `rule` is not split.

    Args:
        params: `model.named_parameters()`, or groups: names tell embeddings and heads from hidden matrices.
        lr: learning rate, a number or a tensor.
        weight_decay: decoupled.
        adamw: settings of everything else: `lr`, `betas`, `eps`, `weight_decay`. By default `lr` and `weight_decay` of
            Muon, betas (0.9, 0.95), eps 1e-8.
        matrices: (name, parameter) -> whether Muon steps it; by default `octavo.optim.hidden_matrix`.
        settings: fields of `octavo.optim.settings.OptimizerOptions`, and Muon's own, named as in `torch.optim.Muon`:
            `momentum`, its decay, 0.95; `nesterov`, True; `ns_coefficients`, a, b, c of the Newton-Schulz iteration;
            `ns_steps`, 5; `eps`, 1e-7, lower bound of the norm that a matrix is divided by; `adjust_lr_fn`:
            `match_rms_adamw`, ratio = 0.2 sqrt(max(R, C)), so that updates have AdamW's RMS, and AdamW's learning rate
            and weight decay can be used; or `original` (also None), ratio = sqrt(max(1, R / C)), with learning rates of
            about 0.02.

    Raises:
        ConfigError: as `Optimizer` does; no names for the default of `matrices`; `original` without a learning rate for
            AdamW; or a parameter for Muon that is not a matrix, or is sharded unevenly other than once by rows.
    """

    rule = "muon"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        *,
        adamw: Mapping[str, Any] | None = None,
        matrices: Callable[[str, Tensor], bool] = hidden_matrix,
        **settings: Any,
    ) -> None:
        self.matrices = matrices
        both = {"lr": lr, "weight_decay": weight_decay}
        own = {name: settings.pop(name, default) for name, default in _MUON.items()}
        own["ns_coefficients"] = tuple(own["ns_coefficients"])
        self._settings: dict[RuleName, dict[str, Any]] = {
            "muon": {**both, **own},
            "adamw": {**both, **_ADAMW, **(adamw or {})},
        }
        self._lr_is_shared = "lr" not in (adamw or {})
        known = (*both, *_ADAMW)
        for name in adamw or {}:
            if name not in known:
                raise ConfigError(f"Muon adamw: unknown setting '{name}'.{did_you_mean(name, known)}")
        check_settings(settings, ("lr", "weight_decay", "adamw", "matrices", *_MUON))
        super().__init__(params, {}, **settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, split into Muon's part and AdamW's part."""
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
                    "Muon distinguishes embeddings and heads from hidden matrices by name: pass"
                    " model.named_parameters(), or groups with the key 'rule', 'muon' or 'adamw'."
                )
            chosen["muon" if self.matrices(name, parameter) else "adamw"].append(one)
        for rule, members in chosen.items():
            if members:
                self._add(rule, {**param_group, "params": members})

    def __getstate__(self) -> dict[str, Any]:
        own = {name: vars(self)[name] for name in ("matrices", "_settings", "_lr_is_shared")}
        return {**super().__getstate__(), **own}

    def _known_settings(self, group: Mapping[str, Any]) -> Collection[str]:
        return {**self.defaults, **self._settings[group["rule"]]}

    def _add(self, rule: RuleName, group: dict[str, Any]) -> None:
        left_out = _MUON.keys() - {"eps"} if rule == "adamw" else {"betas"}
        given = {key: value for key, value in group.items() if key not in left_out}
        group = {**self._settings[rule], **given, "rule": rule}
        is_muons_lr = rule == "adamw" and "lr" not in given and self._lr_is_shared
        if is_muons_lr and self._settings["muon"]["adjust_lr_fn"] != "match_rms_adamw":
            raise ConfigError(
                "Muon: with adjust_lr_fn 'original' its learning rate is about 50 times AdamW's. Set AdamW's by"
                " adamw={'lr': 3e-4}, or take 'match_rms_adamw'."
            )
        super().add_param_group(group)
        if rule == "muon":
            _check(self.param_groups[-1], [e for e in self.entries() if e.group == len(self.param_groups) - 1])

    @torch.no_grad()
    def export_state_dict(self) -> dict[str, Any]:
        """Return `{"muon": ..., "adamw": ...}`: FP32 state dicts for `torch.optim.Muon` and `torch.optim.AdamW`.

        Each contains the groups of its rule only, with parameters numbered from 0.
        """
        return {rule: convert.export(self, self._groups_of(rule)) for rule in _RULES}

    @torch.no_grad()
    def import_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Import the result of `export_state_dict`, or the state dicts of PyTorch's two optimizers under its keys.

        Raises:
            CheckpointError: other keys, or states that do not fit.
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

    def _own(self, entry: Entry, layout: Layout) -> ParamSettings:
        if self.rule_of(entry) != "muon":
            return super()._own(entry, layout)
        rows, cols = entry.parameter.shape
        if self.param_groups[entry.group]["adjust_lr_fn"] == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, cols))
        else:
            ratio = math.sqrt(max(1.0, rows / max(cols, 1)))
        return ParamSettings(entry.group, math.inf, ratio, averages=True)

    def _apply(self, slots: Sequence[Slot], layout: Layout, control: Control, entries: Sequence[Entry]) -> None:
        if layout.rule != "given":
            super()._apply(slots, layout, control, entries)
            return
        given = layout._replace(first=None, gradient=torch.bfloat16, gradient_scaling="none")
        rows = control.coefficients.clone()
        rows[:, COEFFICIENTS.index("factor")] = 1.0  # the factor scales gradients, not updates
        unscaled = control._replace(coefficients=rows)
        for key, batch in self._batches(slots, entries):
            height = key.shape[0]
            make = torch.empty if key.padded_rows == height else torch.zeros
            shape = len(batch), key.padded_rows, key.shape[1]
            updates = make(shape, dtype=torch.bfloat16, device=self.device)
            momentum(batch, layout, control, updates[:, :height].unbind(), self._uploads, nesterov=key.nesterov)
            whole = gather_full(updates, key.layouts)
            whole = orthogonalise(whole, coefficients=key.coefficients, steps=key.steps, eps=key.eps)
            updates = scatter_full(whole, key.layouts, len(batch))
            pairs = zip(batch, updates[:, :height].unbind(), strict=True)
            dropped: dict[str, Any] = {"gradient_scale": None, "first": None, "first_scale": None}
            update([slot._replace(gradient=x, **dropped) for slot, x in pairs], given, unscaled, self._uploads)

    def _batches(self, slots: Sequence[Slot], entries: Sequence[Entry]) -> Iterator[tuple[_BatchKey, list[Slot]]]:
        """Yield batches of matrices of one shape, up to `CHUNK` elements per rank, or one larger matrix."""
        batches: dict[_BatchKey, list[Slot]] = {}
        for slot in slots:
            entry = entries[slot.row]
            group, layouts = self.param_groups[entry.group], shard_layouts(entry.parameter)
            settings = (group["nesterov"], group["ns_coefficients"], group["ns_steps"], group["eps"])
            batches.setdefault(_BatchKey(slot.weight.shape, layouts, *settings), []).append(slot)
        for key, members in batches.items():
            size = max(CHUNK // max(key.padded_rows * key.shape[1], 1), 1)
            for start in range(0, len(members), size):
                yield key, members[start : start + size]


def _check(group: dict[str, Any], entries: Sequence[Entry]) -> None:
    for entry in entries:
        if entry.parameter.dim() != 2:
            raise ConfigError(
                f"Muon: parameter '{entry.name}' of shape {tuple(entry.parameter.shape)} is not a matrix. Leave it to"
                " AdamW: exclude it in `matrices`."
            )
        try:
            shard_layouts(entry.parameter)
        except UnsupportedError as error:
            raise ConfigError(
                f"Muon: parameter '{entry.name}': {error} Leave it to AdamW, or take a number of ranks that divides it."
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


def orthogonalise(
    x_BRC: Tensor,
    *,
    coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
    steps: int = NS_STEPS,
    eps: float = NS_EPS,
) -> Tensor:
    """Return approximately U V^T for x = U S V^T: BF16 (B, R, C), contiguous. `x_BRC` is overwritten.

        x = x / max(|x|, eps)                  Frobenius norm, so that no singular value is above one
        repeat: x = a x + (b G + c G^2) x      G = x x^T; for tall matrices G = x^T x, multiplied from the right

    The Newton-Schulz iteration of `torch.optim.Muon`, BF16 products with FP32 sums, but batched: small matrices are
    bound by launches.

    Args:
        x_BRC: BF16, contiguous.
        coefficients: a, b, c.
    """
    a, b, c = coefficients
    x = x_BRC.div_(x_BRC.norm(dim=(1, 2), keepdim=True).clamp(min=max(eps, LEAST_DIVISOR)))
    is_tall = x.shape[1] > x.shape[2]
    for _ in range(steps):
        gram = x.mT @ x if is_tall else x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, polynomial, beta=a) if is_tall else torch.baddbmm(x, polynomial, x, beta=a)
    return x
