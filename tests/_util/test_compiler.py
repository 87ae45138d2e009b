from __future__ import annotations

import subprocess
import sys

import torch

from octavo._util.compiler import assume_constant_result

CALLS = []


@assume_constant_result
def counted(x: int) -> int:
    CALLS.append(x)
    return len(CALLS)


def test_it_runs_when_it_is_traced_and_never_again() -> None:
    compiled = torch.compile(lambda x: x + counted(3), backend="eager", fullgraph=True)
    assert [int(compiled(torch.zeros(()))) for _ in range(3)] == [1, 1, 1] and CALLS == [3]
    torch._dynamo.reset()


def test_it_is_marked_as_pytorch_marks_it() -> None:
    ours = assume_constant_result(lambda: 1)
    assert vars(ours) == vars(torch.compiler.assume_constant_result(lambda: 1))


def test_who_compiles_nothing_does_not_wait_for_the_compiler() -> None:
    code = "import sys, octavo; octavo.convert, octavo.autocast; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
