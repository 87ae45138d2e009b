"""Algorithm 1 against the optimal assignment, by brute force, and against splitting the list in order."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.distributed import Assignment, greedy_assignment
from octavo.errors import ConfigError

sizes_and_ranks = st.tuples(st.lists(st.integers(0, 50), max_size=7), st.integers(1, 4))


def best(sizes, ranks):
    """The smallest possible load of the fullest rank."""
    return min(
        max(sum(s for s, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks))
        for owners in itertools.product(range(ranks), repeat=len(sizes))
    )


@given(sizes_and_ranks)
def test_no_rank_has_more_than_grahams_bound(case):
    sizes, ranks = case
    assert max(greedy_assignment(sizes, ranks).loads) <= (4 / 3 - 1 / (3 * ranks)) * best(sizes, ranks) + 1e-9


@given(sizes_and_ranks)
def test_every_tensor_has_one_rank(case):
    sizes, ranks = case
    made = greedy_assignment(sizes, ranks)
    assert sorted(tensor for rank in range(ranks) for tensor in made.of(rank)) == list(range(len(sizes)))
    assert sum(made.loads) == sum(sizes) and made.imbalance >= 1
    assert list(made.loads) == [sum(sizes[tensor] for tensor in made.of(rank)) for rank in range(ranks)]


def test_the_classic_worst_case_reaches_the_bound():
    """Graham's own example for 2 ranks: 3 3 2 2 2 fits 6 + 6; the largest first makes 7 + 5."""
    made = greedy_assignment([3, 3, 2, 2, 2], 2)
    assert made.loads == (7, 5) and best([3, 3, 2, 2, 2], 2) == 6
    assert made.imbalance == pytest.approx(7 / 6)


def test_the_largest_goes_first_and_ties_go_to_the_first_rank():
    assert greedy_assignment([1, 5, 5, 2], 2).owners == (1, 0, 1, 0)
    assert greedy_assignment([], 3).loads == (0, 0, 0) and greedy_assignment([], 3).imbalance == 1
    assert greedy_assignment([4], 3).owners == (0,)


def llama(layers, dim, ffn, vocab):
    block = [dim * dim, dim * dim // 4, dim * dim // 4, dim * dim, dim * ffn, dim * ffn, dim * ffn, dim, dim]
    return [vocab * dim, *block * layers, dim, vocab * dim]


@pytest.mark.parametrize("ranks", [4, 8])
def test_of_a_llama_it_is_even_where_order_is_not(ranks):
    sizes = llama(32, 4096, 14336, 128256)
    starts, total = itertools.accumulate([0, *sizes[:-1]]), sum(sizes)
    in_order = Assignment(tuple(start * ranks // total for start in starts), tuple(sizes), ranks)
    assert greedy_assignment(sizes, ranks).imbalance < 1.02 < in_order.imbalance


def test_a_tensor_larger_than_a_share_cannot_be_mended():
    made = greedy_assignment([90, 5, 5], 4)
    assert made.imbalance == 3.6 == best([90, 5, 5], 4) * 4 / 100


def test_more_tensors_leave_those_before_where_they_are():
    first = greedy_assignment([7, 3], 2)
    more = first.with_more([2, 3])
    assert more.owners[:2] == first.owners and more.loads == (7, 8)


def test_it_is_printed():
    assert str(greedy_assignment([2_000_000, 1_000_000], 2)).splitlines() == [
        "rank   tensors          MB",
        "0            1       2.000",
        "1            1       1.000",
        "the largest has 1.333 times the mean",
    ]


def test_what_cannot_be_assigned_is_an_error():
    with pytest.raises(ConfigError, match="over 0 ranks"):
        greedy_assignment([1], 0)
    with pytest.raises(ConfigError, match="cannot be negative"):
        greedy_assignment([-1], 2)
