from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import octavo
from octavo._util.compiler import assume_constant_result, skip_own_guards, traced_version

CALLS = []


@assume_constant_result
def counted(x: int) -> int:
    CALLS.append(x)
    return len(CALLS)


def test_it_runs_when_it_is_traced_and_never_again() -> None:
    compiled = torch.compile(lambda x: x + counted(3), backend="eager", fullgraph=True)
    assert [int(compiled(torch.zeros(()))) for _ in range(3)] == [1, 1, 1] and CALLS == [3]
    torch._dynamo.reset()


def test_a_traced_tensor_has_another_version_once_it_is_written_to() -> None:
    seen = []

    def versions(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        before, again = traced_version(y), traced_version(y)
        y[:1].mul_(2)
        seen.extend([before, again, traced_version(y), traced_version(x)])
        return y

    torch.compile(versions, backend="eager", fullgraph=True)(torch.zeros(3))
    before, again, after, other = seen
    assert before == again and len({before, after, other}) == 3
    torch._dynamo.reset()
    torch.compile(versions, backend="eager", fullgraph=True)(torch.zeros(3))
    assert not set(seen[:4]) & set(seen[4:])
    torch._dynamo.reset()
    assert traced_version(torch.zeros(3)) != traced_version(torch.zeros(3))


def test_it_is_marked_as_pytorch_marks_it() -> None:
    ours = assume_constant_result(lambda: 1)
    assert vars(ours) == vars(torch.compiler.assume_constant_result(lambda: 1))


def test_who_compiles_nothing_does_not_wait_for_the_compiler() -> None:
    code = "import sys, octavo; octavo.convert, octavo.autocast; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_guards_on_own_code_are_skipped_and_those_on_settings_are_not() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    octavo.convert(model, policy=octavo.Policy(min_gain=0))
    all_guards: list[Any] = []
    skipped: list[Any] = []

    def filtered(guards: Sequence[Any]) -> list[bool]:
        kept = skip_own_guards(guards)
        all_guards.extend(guards)
        skipped.extend(guard for guard, keeps in zip(guards, kept, strict=True) if not keeps)
        return kept

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, options={"guard_filter_fn": filtered})
    x = torch.randn(16, 32)
    assert torch.equal(compiled(x), model(x))
    assert len(skipped) > 10
    kept = {guard.name for guard in all_guards} - {guard.name for guard in skipped}
    assert any(name.endswith("host_state.now.is_open_to_compilers") for name in kept)
    with octavo.disabled(model):
        plain = compiled(x)
        assert torch.equal(plain, model(x))
    assert not torch.equal(compiled(x), plain)  # in FP8 again
    octavo.convert(model, "tensorwise", policy=octavo.Policy(min_gain=0))
    assert torch.equal(compiled(x), model(x))
    torch._dynamo.reset()


def test_state_of_a_module_is_guarded_however_it_is_reached() -> None:
    module = "G['__import_octavo_dot_nn_dot_functional']"
    code = ["", ".fprop", ".fprop.__defaults__[0]", ".kernels", ".kernels.gemm.__code__", "._X", ".SavedInput.__new__"]
    state = [".kernels.runtime.host_state.now", ".no_such_variable"]
    own = [SimpleNamespace(name=module + path) for path in code]
    others = [SimpleNamespace(name=name) for name in (*(module + path for path in state), "L['x']", "G['torch'].F")]
    assert skip_own_guards([*own, *others]) == [False] * len(own) + [True] * len(others)
