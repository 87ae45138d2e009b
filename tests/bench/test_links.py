"""Collectives on paper: never below what bandwidth allows, and equal to the closed form where a hop costs nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_bench.assumptions import Group, Links, bound

groups = st.builds(Group, hosts=st.integers(1, 512), per_host=st.sampled_from([1, 2, 4, 8]))
links = st.builds(
    Links,
    inside=st.floats(1e11, 1e12),
    outside=st.floats(1e9, 1e11),
    hop_inside=st.floats(0, 1e-5),
    hop_outside=st.floats(0, 1e-4),
)
sizes = st.floats(1, 1e12)


@given(links, groups, sizes)
def test_nothing_is_faster_than_the_links(made, group, size):
    least = bound(size, group.ranks, made.rate(group))
    assert made.gather(size, group) >= least * (1 - 1e-12)
    assert made.all_reduce(size, group) >= 2 * least * (1 - 1e-12)


@given(links, groups, sizes)
def test_more_hosts_never_make_it_cheaper(made, group, size):
    more = Group(group.hosts * 2, group.per_host)
    assert made.gather(size, more) >= made.gather(size, group)
    assert made.all_reduce(size, more) >= made.all_reduce(size, group)


@given(groups, sizes)
def test_without_latency_it_is_the_closed_form(group, size):
    made = Links(inside=300e9, outside=40e9, hop_inside=0, hop_outside=0)
    rate = 300e9 if group.hosts == 1 else min(300e9, 40e9 * group.per_host)
    share = (group.ranks - 1) / group.ranks
    assert made.gather(size, group) == pytest.approx(share * size / rate)
    assert made.all_reduce(size, group) == pytest.approx(2 * share * size / rate)


@given(links, groups)
def test_one_rank_and_nothing_to_send_take_no_time(made, group):
    assert made.gather(1e9, Group(1, 1)) == made.all_reduce(1e9, Group(1, 1)) == 0
    assert made.gather(0, group) == made.all_reduce(0, group) == 0


def test_a_ring_counts_its_hops():
    made = Links(inside=1e15, outside=1e15, hop_inside=1.0, hop_outside=100.0)
    assert made.gather(1, Group(3, 4)) == pytest.approx(2 * 100 + 9)
    assert made.gather(1, Group(1, 8)) == pytest.approx(7)
    assert made.send(1) == pytest.approx(100)


def test_a_tree_takes_over_where_latency_counts():
    made = Links(inside=300e9, outside=40e9, hop_inside=2e-6, hop_outside=6e-6)
    wide = Group(512, 8)
    assert made.all_reduce(1e3, wide) == pytest.approx(2 * (9 * 6e-6 + 7 * 2e-6), rel=1e-2)
    assert made.all_reduce(1e3, wide) < 2 * made.gather(1e3, wide)
    assert made.all_reduce(1e12, Group(2, 8)) == pytest.approx(2 * made.gather(1e12, Group(2, 8)))


def test_cards_of_a_host_carry_a_ring_together():
    made = Links(inside=300e9, outside=40e9, hop_inside=0, hop_outside=0)
    assert [made.rate(Group(2, count)) for count in (1, 2, 4, 8)] == [40e9, 80e9, 160e9, 300e9]
