"""What runs in FP8 of a model, measured: `python measure.py` prints and writes the table of all classes.

A dispatch mode counts the FLOPs of the products that have a parameter, or a view or a copy of one, as an operand: of
the model as it is, and after `octavo.convert`, where those in FP8 have codes as operands instead.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cases import CASES, Case
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo import Plan, Policy

SMALLEST = 16
"""`Policy.min_features` here."""
POLICY = Policy(min_features=SMALLEST)
_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1, _aten.mv: 0, _aten.linear: 0, _aten._grouped_mm: 0,
    _aten.convolution: 0, _aten._addmm_activation: 1,
}  # fmt: skip
"""Operator -> position of its first factor."""
_COPIES = {_aten._to_copy, _aten.clone, _aten.cat, _aten.stack, _aten.index, _aten.index_select}


class Products(TorchDispatchMode):
    """FLOPs of products with a parameter, by its name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()
        self._held: list[Tensor] = []
        self._names: dict[int, str] = {}
        for name, parameter in _named(model):
            self._names[parameter.untyped_storage().data_ptr()] = name

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def _name(self, x: Any) -> str | None:
        return self._names.get(x.untyped_storage().data_ptr()) if type(x) in (Tensor, nn.Parameter) else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in _COPIES:
            sources = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            name = next(filter(None, map(self._name, sources)), None)
            if name is not None:
                self._held.append(result)  # its address stays its own
                self._names[result.untyped_storage().data_ptr()] = name
        elif packet in _PRODUCTS:
            factors = args[_PRODUCTS[packet] :][:2]
            name = next((named for x in reversed(factors) if (named := self._name(x))), None)
            if name is not None:
                terms = factors[1][0].numel() if packet is _aten.convolution else factors[0].shape[-1]
                self.flops[name] += 2 * result.numel() * terms
        return result


class Result(NamedTuple):
    """What a plan says of a class, and what runs."""

    right: bool
    """Whether exactly those weights are in FP8 that should be, and the others have their reason."""
    share: float
    """Share of FP8 in the FLOPs of those that should be."""
    share_of_all: float
    """The same of all products with a parameter."""
    layers: str
    """Layers in FP8 of all."""
    wrong: dict[str, str]
    """Weight -> what is wrong."""
    unsaid: list[str]
    """Weights that the plan has in FP8 and that are multiplied in high precision."""


def measure(case: Case) -> Result:
    torch.manual_seed(0)
    model, inputs = case.make().train(), case.inputs()
    before = _flops(model, inputs)
    plan = octavo.convert(model, policy=POLICY)
    after = _flops(model, inputs)
    large = {name for name in before if _is_large(model, name)}
    should = {name for name in large if _reason(case, name) is None}
    planned, reasons = _planned(plan, model), _reasons(plan)
    wrong = {name: f"not in FP8: {reasons.get(name, 'no row')}" for name in should - planned}
    wrong |= {name: "in FP8" for name in planned if name in before and name not in should}
    for name in large - should - planned:
        if _reason(case, name) not in reasons.get(name, ""):
            wrong[name] = f"its reason: {reasons.get(name, 'no row')}"
    unsaid = sorted(name for name in planned if after[name])
    right = sum(before[name] for name in should), sum(before.values())
    in_fp8 = sum(before[name] - after[name] for name in should), sum(before.values()) - sum(after.values())
    shares = [part / max(whole, 1) for part, whole in zip(in_fp8, right, strict=True)]
    layers = f"{plan.fp8_layers} of {len(plan.layers)}"
    return Result(not wrong, round(shares[0], 3), round(shares[1], 3), layers, wrong, unsaid)


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter with all of its names: the last is that of a head which shares its weight."""
    return model.named_parameters(remove_duplicate=False)


def _is_large(model: nn.Module, name: str) -> bool:
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, _ConvNd):
        return owner.groups == 1 and min(owner.in_channels, owner.out_channels) >= SMALLEST
    shape = model.get_parameter(name).shape
    return len(shape) > 1 and min(shape[-2:]) >= SMALLEST


def _flops(model: nn.Module, inputs: Any) -> Counter[str]:
    torch.manual_seed(1)
    with Products(model) as seen:
        if isinstance(inputs, dict):
            model(**inputs)
        else:
            model(*inputs)
    return seen.flops


def _reason(case: Case, name: str) -> str | None:
    return next((why for pattern, why in case.kept.items() if fnmatchcase(name, pattern)), None)


def _planned(plan: Plan, model: nn.Module) -> set[str]:
    names = {id(parameter): name for name, parameter in _named(model)}
    layers = [row for row in plan.layers if row.is_fp8 and not row.is_experts]
    weights = {f"{row.module}.{'in_proj_weight' if row.is_in_projection else 'weight'}" for row in layers}
    found = {names[id(model.get_parameter(weight))] for weight in weights}
    for module, roles in plan.experts.items():
        experts = model.get_submodule(module)
        found |= {names[id(experts.get_parameter(name))] for name in (*roles.inner, roles.down)}
    return found


def _reasons(plan: Plan) -> dict[str, str]:
    rows = {f"{row.name}.weight": row.reason for row in plan.layers if not row.is_fp8}
    return rows | {weight.name: weight.reason for weight in plan.unconverted}


def is_there(case: Case) -> bool:
    return case.package == "written" or importlib.util.find_spec(case.package) is not None


def _rows(names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names:
        case = CASES[name]
        if not is_there(case):
            print(f"{name:42} {case.package} is not installed")
            continue
        try:
            result = measure(case)
        except Exception as error:
            traceback.print_exc()
            yield name, {"package": case.package, "failed": f"{type(error).__name__}: {error}"}
            continue
        print(f"{name:42} {'right' if result.right else 'WRONG'} {result.share:.3f} {result.layers}", flush=True)
        for where, what in {**result.wrong, **dict.fromkeys(result.unsaid, "planned, and not run in FP8")}.items():
            print(f"    {where}: {what}", flush=True)
        yield name, {"package": case.package, **result._asdict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="classes; all without any")
    parser.add_argument("--package", action="append", help="only classes of this package")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = options.names or [name for name, case in CASES.items() if case.package in (options.package or case.package)]
    rows = dict(_rows(names))
    right = sum(row.get("right", False) for row in rows.values())
    shares = sorted(row.get("share", 0.0) for row in rows.values())
    print(f"{right} of {len(rows)} plans right; least share in FP8 {shares[0]:.3f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
