from hypothesis import given
from hypothesis import strategies as st

from octavo.memory.fit import largest


@given(
    a=st.integers(0, 50), b=st.integers(1, 1000), c=st.integers(0, 10**6),
    budget=st.integers(1, 10**8), start=st.integers(1, 200), power=st.floats(1, 4),
)  # fmt: skip
def test_the_largest_that_fits_is_found_and_no_size_is_asked_for_twice(
    a: int, b: int, c: int, budget: int, start: int, power: float
) -> None:
    asked: list[int] = []

    def peak_of(size: int) -> int:
        asked.append(size)
        return a * size**3 + b * size + c

    found = largest(peak_of, budget, start=start, power=power)
    assert found == 0 or a * found**3 + b * found + c <= budget
    assert a * (found + 1) ** 3 + b * (found + 1) + c > budget
    assert len(asked) == len(set(asked))


def test_few_sizes_are_tried() -> None:
    asked: list[int] = []

    def peak_of(size: int) -> int:
        asked.append(size)
        return 16 * size**3 * 4096 + 10**9

    assert largest(peak_of, 139 * 2**30) == 131
    assert len(asked) <= 6
