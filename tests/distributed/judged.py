"""Remember, between conversions, how the modules of Octavo's own models were judged: most tests convert one.

`octavo.convert` runs copies of modules many times to see what they compute. It does so once per model; a process of
tests converts thousands, all of the same few classes. What decides here is the first verdict on a class with the same
settings and shapes, in each process. Modules of any other class, as those in the tests of recognition, are judged anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

from torch import nn

from octavo.nn import probe

_verdicts: dict[Hashable, Any] = {}
_judge_once = probe.judge_once


def _key(module: nn.Module) -> Hashable | None:
    """Return a key of what a verdict may depend on, or None if it may depend on more than code, numbers and shapes."""
    key: list[Hashable] = [probe._sharing(module)]
    for name, part in module.named_modules(remove_duplicate=False):
        held = {field: value for field, value in vars(part).items() if field not in probe.OF_EVERY_MODULE}
        if part._buffers or not all(value is None or type(value) in (bool, int, float, str) for value in held.values()):
            return None
        shapes = [(each, p.shape, p.dtype) for each, p in part.named_parameters(recurse=False)]
        key.append((name, type(part), type(part).forward, repr(held), *shapes))
    return tuple(key) if type(module).__module__.startswith("octavo.lab.models.") else None


def judge_once(judge: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    """Stand for `octavo.nn.probe.judge_once`."""
    judge_anew = _judge_once(judge)

    def judged(module: nn.Module) -> Any:
        key = _key(module) if isinstance(judge, FunctionType) and judge.__closure__ is None else None
        if key is None:
            return judge_anew(module)
        key = judge.__module__, judge.__qualname__, key
        if key not in _verdicts:
            _verdicts[key] = judge_anew(module)
        return _verdicts[key]

    return judged


probe.judge_once = judge_once  # before the modules that import it by name
