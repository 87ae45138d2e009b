"""Layers that share an input: every way to write an attention is recognised, and nothing that only looks so."""

import contextlib

import pytest
import torch.nn.functional as F
from torch import Tensor, nn
from user_modules import WIDTH, Attention, decorated

from octavo.conversion import convert
from octavo.conversion.shared_inputs import find_shared


class OneLine(Attention):
    def forward(self, x):
        return self.o(self.q(x) + self.k(x) * self.v(x).transpose(0, 1))


class OtherSelf(Attention):
    def forward(me, x):
        return me.q(x), me.k(x), me.v(x)


class Annotated(Attention):
    def forward(self, x: Tensor) -> Tensor:
        """With a docstring, an annotated assignment and one in place."""
        q: Tensor = self.q(x)
        q += self.k(x)
        return q + self.v(x)


class InWith(Attention):
    def forward(self, x):
        with contextlib.nullcontext():
            q, k = self.q(x), self.k(x)
        return q, k, self.v(x)


class HuggingFace(Attention):
    @decorated
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, 8)

        query_states = self.q(hidden_states).view(hidden_shape).transpose(1, 2)
        key_states = self.k(hidden_states).view(hidden_shape).transpose(1, 2)
        value_states = self.v(hidden_states).view(hidden_shape).transpose(1, 2)
        if attention_mask is not None:
            query_states = query_states + attention_mask
        attn_output = (query_states + key_states + value_states).reshape(*input_shape, -1)
        return self.o(attn_output), None


@pytest.mark.parametrize("cls", [Attention, OneLine, OtherSelf, Annotated, InWith, HuggingFace])
def test_three_calls_on_one_variable(cls):
    assert find_shared(cls()) == [("q", "k", "v")]


class Cross(Attention):
    def forward(self, x, memory):
        return self.o(self.q(x) + self.k(memory) + self.v(memory))


class CrossInto(Attention):
    def forward(self, x, memory):
        return self.q(x), self.o(x), self.k(memory), self.v(memory)


class Reassigned(Attention):
    def forward(self, x):
        q = self.q(x)
        x = self.norm(x)
        return q, self.k(x), self.v(x)


class ReassignedInPlace(Attention):
    def forward(self, x):
        q = self.q(x)
        x += 1
        return q, self.k(x), self.v(x)


class ReassignedInABranch(Attention):
    def forward(self, x, memory=None):
        q = self.q(x)
        if memory is not None:
            x = memory
        return q, self.k(x), self.v(x)


class ReassignedInAWith(Attention):
    def forward(self, x):
        with contextlib.nullcontext():
            q = self.q(x)
            x = self.norm(x)
            k = self.k(x)
        return q, k, self.v(x)


class ReassignedByAWith(Attention):
    def forward(self, x):
        q = self.q(x)
        with contextlib.nullcontext(x + 1) as x:
            return q, self.k(x), self.v(x)


class ReassignedByAWalrus(Attention):
    def forward(self, x):
        return self.q(x := self.norm(x)), self.o(1), self.k(x) + (self.v(x))


@pytest.mark.parametrize(
    ("cls", "groups"),
    [
        (Cross, [("k", "v")]),
        (CrossInto, [("q", "o"), ("k", "v")]),
        (Reassigned, [("k", "v")]),
        (ReassignedInPlace, [("k", "v")]),
        (ReassignedInABranch, [("k", "v")]),
        (ReassignedInAWith, [("k", "v")]),
        (ReassignedByAWith, [("k", "v")]),
        (ReassignedByAWalrus, [("k", "v")]),
    ],
)
def test_another_variable_or_another_value_is_another_group(cls, groups):
    assert find_shared(cls()) == groups


class InABranch(Attention):
    def forward(self, x, cached=False):
        q = self.q(x)
        if not cached:
            return q, self.k(x), self.v(x)
        return q


class InAnExpression(Attention):
    def forward(self, x, cached=False):
        return self.q(x), None if cached else self.k(x), cached or self.v(x)


class InALoop(Attention):
    def forward(self, x):
        for _ in range(2):
            q, k = self.q(x), self.k(x)
        while False:
            self.v(x)
        return q, k, [self.o(x) for _ in range(2)], lambda: self.v(x)


class Keyword(Attention):
    def forward(self, x):
        return self.q(input=x), self.k(input=x), self.v(x)


class CalledTwice(Attention):
    def forward(self, x):
        return self.q(x), self.k(x), self.q(x)


class OfAnother(Attention):
    def forward(self, x, other):
        return self.q(x), other.k(x), other.v(x)


class Indexed(Attention):
    def forward(self, x):
        return self.q(x[0]), self.k(x[1]), self.v(x[2])


@pytest.mark.parametrize("cls", [InABranch, InAnExpression, InALoop, Keyword, CalledTwice, OfAnother, Indexed])
def test_what_may_not_run_or_is_called_otherwise(cls):
    assert find_shared(cls()) == []


def test_modules_without_a_source():
    namespace = {"Attention": Attention}
    exec("class Made(Attention):\n    def forward(self, x):\n        return self.q(x), self.k(x)", namespace)
    assert find_shared(namespace["Made"]()) == []
    assert find_shared(nn.Linear(8, 8)) == find_shared(nn.Identity()) == find_shared(nn.Sequential()) == []

    class Lambda(Attention):
        forward = lambda self, x: (self.q(x), self.k(x))  # noqa: E731

    assert find_shared(Lambda()) == []


class CallableWithoutHash:
    __hash__ = None

    def __call__(self, x):
        return x


class WithCallable(Attention):
    forward = CallableWithoutHash()


def test_a_forward_that_is_an_object_without_a_hash():
    assert find_shared(WithCallable()) == []


def test_a_fused_mlp_that_shares_is_read_in_the_users_source():
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    module = Written()
    assert find_shared(module) == [("gate", "up")]
    convert(module)
    assert find_shared(module) == [("gate", "up")]
