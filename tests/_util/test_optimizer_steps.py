import pytest
import torch
from torch import nn

from octavo._util import optimizer_steps


class Wrapper(torch.optim.Optimizer):
    """Steps other optimizers, as ZeRO, Lookahead and SAM do."""

    def __init__(self, *inner, parameters=None, fails=False):
        self.inner, self.fails = inner, fails
        super().__init__(parameters or [p for one in inner for g in one.param_groups for p in g["params"]], {})

    def step(self, closure=None):
        for one in self.inner:
            one.step()
        if self.fails:
            raise RuntimeError("lost")


class Subclass(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def sgd():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.1)


@pytest.fixture
def seen(monkeypatch):
    calls = []
    monkeypatch.setattr(optimizer_steps, "_callbacks", [])
    optimizer_steps.after_outermost_step(calls.append)
    return calls


def test_a_wrapped_step_is_one_step_with_all_that_stepped(seen):
    a, b = sgd(), sgd()
    a.step()
    inner = Wrapper(a, b)
    outer = Wrapper(inner, parameters=[nn.Parameter(torch.ones(1))])
    outer.step()
    assert seen == [[a], [a, b, inner, outer]]


def test_a_subclass_that_calls_the_step_of_its_base_steps_once(seen):
    torch.optim.AdamW([nn.Parameter(torch.ones(1))]).step()  # PyTorch hooks the base class from now on
    subclass = Subclass([nn.Parameter(torch.ones(1))])
    subclass.step()
    assert len(seen) == 2 and set(map(id, seen[1])) == {id(subclass)}


def test_a_step_that_raises_leaves_no_trace(seen):
    a, b = sgd(), sgd()
    outer = Wrapper(a, fails=True)
    with pytest.raises(RuntimeError, match="lost"):
        outer.step()
    assert seen == []
    b.step()
    outer.fails = False
    outer.step()
    assert seen == [[b], [a, outer]]


def test_a_compiled_step_counts_once(seen):
    a = sgd()
    outer = Wrapper(a)
    compiled = torch.compile(outer.step, backend="eager")
    compiled()
    compiled()
    assert seen == [[a, outer]] * 2
