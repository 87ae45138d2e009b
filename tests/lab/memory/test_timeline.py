from hypothesis import given
from hypothesis import strategies as st

from octavo.lab.memory.timeline import GRAIN, SEGMENT, Allocation, Step, Timeline, reserved

SIZES = st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 8)), min_size=1, max_size=12)


def recorded(sizes: list[tuple[int, int]]) -> Timeline:
    """Return a timeline where each allocation is freed once so many others have come; 0: never."""
    timeline, made = Timeline(), []
    for size, life in sizes:
        made.append((timeline.allocate(size, "forward"), life))
        for number, (allocation, lives) in enumerate(made):
            if lives and len(made) - number >= lives:
                timeline.free(allocation)
    return timeline


@given(sizes=SIZES, since=st.integers(0, 5))
def test_the_peak_is_where_the_most_is_alive(sizes: list[tuple[int, int]], since: int) -> None:
    timeline = recorded(sizes)
    totals = [sum(a.size for a in timeline.alive_at(event)) for event in range(since, max(timeline.now, since + 1))]
    assert sum(a.size for a in timeline.alive_at(timeline.peak(since=since))) == max(totals)


@given(size=st.integers(1, 10**7))
def test_sizes_are_those_of_the_allocator(size: int) -> None:
    taken = Timeline().allocate(size, "forward")
    assert taken.size % GRAIN == 0
    assert 0 <= taken.size - size < GRAIN
    assert reserved([taken]) % SEGMENT == 0
    assert reserved([taken]) >= taken.size


def test_small_allocations_share_a_segment() -> None:
    assert reserved([Allocation(SEGMENT // 4, 0, "forward")] * 4) == SEGMENT
    assert reserved([Allocation(SEGMENT + GRAIN, 0, "forward")] * 2) == 4 * SEGMENT


def test_a_kind_is_known_by_when_memory_comes_and_goes() -> None:
    timeline = Timeline()
    batch, step = timeline.allocate(1, "outside"), Step(start=1, backward=3, update=7)
    kept = timeline.allocate(1, "forward")
    read = timeline.allocate(1, "forward")
    gradient, moment = timeline.allocate(1, "backward"), timeline.allocate(1, "backward")
    timeline.free(moment)
    timeline.free(read)
    timeline.now = 8
    timeline.free(gradient)
    timeline.steps.append(step)
    timeline.settle()
    kinds = [allocation.kind for allocation in (batch, kept, read, gradient, moment)]
    assert kinds == ["activations", "weights", "activations", "gradients", "workspace"]
