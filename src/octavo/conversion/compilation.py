"""Compilation of a model's repeated blocks in place: once per class of block, whatever their number.

The rest of the model stays eager. That includes everything that depends on the values of a batch: transformers decides
between a mask and causal attention there, by reading the batch, which it cannot do in a compiled model.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from octavo._util.compiler import skip_own_guards
from octavo.conversion.blocks import choose
from octavo.errors import ConfigError, UnsupportedError
from octavo.nn.adopted import Adopted, own_class
from octavo.nn.modules import full_name


def compile_blocks(
    model: nn.Module,
    *,
    blocks: str | Sequence[str] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    backend: str | Callable[..., Any] | None = None,
) -> Compiled:
    """Compile a model's repeated blocks in place, each by `nn.Module.compile`. The returned object undoes it.

    Equal blocks share their compiled code. Names, parameters, hooks and state dicts stay, and no guards are kept on
    Octavo's own code (`octavo.skip_own_guards`). A model without repeated blocks is compiled as a whole.

    Call it before or after `octavo.convert`, `octavo.revert` and `octavo.recompute`: compilation happens in the first
    forward, and again after a change. Call it before FSDP2's `fully_shard`, DDP and an optimizer's first step. A
    `deepcopy` of the model is not compiled.

    Args:
        blocks: name patterns of the modules to compile; default the outermost modules of every class of which some
            module has two children that are equal but for their values.
        dynamic: as in `torch.compile`. None compiles for the shapes of the first batch, and once more for variable
            shapes if another comes; False compiles for each.
        fullgraph: raise at the first forward if a block is not one graph.
        backend: as in `torch.compile`.

    Raises:
        ConfigError: a pattern matches nothing, a chosen module is inside another one, or the model is the result of
            `torch.compile`.
        UnsupportedError: parameters are partitioned by DeepSpeed's ZeRO-3, whose hooks cannot be compiled.
    """
    names = repeated_blocks(model) if blocks is None else choose(model, blocks)
    _check(model, names)
    modules = {name: model.get_submodule(name) for name in names or [""]}
    left = {name: "compiled already" for name, module in modules.items() if _is_compiled(module)}
    settings: dict[str, Any] = {"fullgraph": fullgraph, "dynamic": dynamic, **_limit(modules.values())}
    if backend is not None:
        settings["backend"] = backend
    compiled = {name: class_before(module).__name__ for name, module in modules.items() if name not in left}
    for name in compiled:
        modules[name].compile(**settings, options={"guard_filter_fn": skip_own_guards})
    return Compiled(model, compiled, left | dict.fromkeys(_beside(model, [*modules]), "not repeated"))


@dataclass(frozen=True)
class Compiled:
    """What `octavo.compile` compiled. `remove()` undoes it."""

    model: nn.Module
    blocks: dict[str, str]
    """Full name of each compiled module, and its class before any conversion; the name of a whole model is empty."""
    left: dict[str, str] = field(default_factory=dict)
    """Full names of the outermost modules with parameters that stay as they were, and why."""

    def remove(self) -> None:
        """Let the blocks run in eager mode again."""
        for name in self.blocks:
            self.model.get_submodule(name)._compiled_call_impl = None

    def __str__(self) -> str:
        counts = {kind: [*self.blocks.values()].count(kind) for kind in dict.fromkeys(self.blocks.values())}
        parts = [f"{count} x {kind}" for kind, count in counts.items()]
        if "" in self.blocks:
            parts = [f"{self.blocks['']} as a whole: it has no repeated blocks"]
        lines = [f"compiled: {', '.join(parts) or 'nothing'}"]
        for reason in dict.fromkeys(self.left.values()):
            names = [name or "the model" for name, why in self.left.items() if why == reason]
            lines.append(f"left as they were, {reason}: {_abridged(names)}")
        return "\n".join(lines)


def repeated_blocks(model: nn.Module) -> list[str]:
    """Return the full names of a model's repeated blocks, in order; none is inside another.

    A class of modules is repeated if some module has two children of it that are equal but for their values; a block
    has two weights or more. All its modules are blocks, equal or not: some are wider, or begin a stage.
    """
    kinds: set[Any] = set()
    for _, children in _levels(model, kinds):
        structures = [_structure(child) for child in children.values()]
        counts = Counter(structures)
        for child, structure in zip(children.values(), structures, strict=True):
            if counts[structure] > 1 and _is_block(child):
                kinds.add(_kind(child))
    blocks = {
        full_name(name, child)
        for name, children in _levels(model, kinds)
        for child, module in children.items()
        if _kind(module) in kinds and _is_block(module)
    }
    return [name for name, _ in model.named_modules() if name in blocks]


def class_before(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module without those that Octavo and FSDP2 have mixed into it."""
    cls: Any = own_class(module)
    while issubclass(cls, Adopted) and "parent" in vars(cls):
        cls = cls.parent
    return cls  # type: ignore[no-any-return]


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers that are never called."""


def _levels(model: nn.Module, kinds: set[Any]) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """Yield each module's full name and children, from the model down, without the insides of modules of `kinds`.

    `kinds` may grow between two modules.
    """
    pending = [("", model)]
    while pending:
        name, module = pending.pop(0)
        children = dict(module.named_children())
        yield name, children
        pending += [
            (full_name(name, child), part)
            for child, part in children.items()
            if not (_kind(part) in kinds and _is_block(part))
        ]


def _kind(module: nn.Module) -> Any:
    """Return what blocks of one code have in common: their class; for `nn.Sequential` the structure."""
    cls = class_before(module)
    return _structure(module) if cls is nn.Sequential else cls


def _structure(module: nn.Module) -> Any:
    """Return a key that is the same for modules that are equal but for their values."""
    shapes = tuple((name, None if p is None else tuple(p.shape)) for name, p in module._parameters.items())
    return class_before(module), shapes, tuple((name, _structure(child)) for name, child in module.named_children())


def _is_block(module: nn.Module) -> bool:
    """Return whether a module can be a block: it is called, and has at least two weights."""
    return not isinstance(module, _LISTS) and sum(p.dim() > 1 for p in module.parameters()) > 1


def _check(model: nn.Module, names: Sequence[str]) -> None:
    """Raise if the modules with these names cannot be compiled each by itself."""
    for block, outer in [(name, outer) for name in names for outer in _around(name)]:
        if outer in names:
            raise ConfigError(f"blocks: '{block}' is inside '{outer}', which is compiled with all that is in it.")
        if _is_compiled(model.get_submodule(outer)):
            raise ConfigError(
                f"octavo.compile: {outer or 'the model'} is compiled already, with the blocks in it. Leave that out: "
                "equal blocks compile faster one by one."
            )
    partitioned = next((name for name, p in model.named_parameters() if hasattr(p, "ds_id")), None)
    if partitioned is not None:
        raise UnsupportedError(
            f"octavo.compile: {partitioned} is partitioned by DeepSpeed's ZeRO-3, whose hooks bring weights in each "
            "call and cannot be compiled. Train without compilation, or with FSDP2."
        )


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def _around(name: str) -> list[str]:
    """Return the full names of the modules around one, from the model on."""
    return ["", *itertools.accumulate(name.split("."), full_name)][:-1]


def _limit(modules: Iterable[nn.Module]) -> dict[str, Any]:
    """Return the option that lets PyTorch keep more graphs than usual for one class: some per structure of blocks."""
    structures = len({_structure(module) for module in modules})
    if structures < 4 or "recompile_limit" not in inspect.signature(torch.compile).parameters:
        return {}
    return {"recompile_limit": 8 + 2 * structures}


def _beside(model: nn.Module, chosen: Sequence[str]) -> list[str]:
    """Return the full names of the outermost modules with parameters that contain no chosen module, nor are in one."""
    around = {outer for name in chosen for outer in _around(name)} - {*chosen}
    return [
        name
        for name, module in model.named_modules()
        if name and name.rpartition(".")[0] in around and name not in around | {*chosen} and [*module.parameters()]
    ]


def _abridged(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
