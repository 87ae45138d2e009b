"""A granularity covers any matrix with tiles; what is filled in at ragged edges never reaches a scale."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.numerics import (
    E4M3,
    E5M2,
    PER_COLUMN,
    PER_ROW,
    PER_TENSOR,
    BLOCK_128x128,
    Granularity,
    GROUP_1x32,
    TILE_1x128,
    granularity_named,
    quantize,
    tile_amax,
)

NAMED = {
    "tensor": PER_TENSOR,
    "row": PER_ROW,
    "column": PER_COLUMN,
    "1x128": TILE_1x128,
    "128x128": BLOCK_128x128,
    "1x32": GROUP_1x32,
}
SHAPES = [(1, 1), (1, 129), (129, 1), (5, 7), (128, 128), (127, 129), (130, 257)]
every_granularity = pytest.mark.parametrize("granularity", NAMED.values(), ids=NAMED)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))


def amax_by_loops(x: np.ndarray, granularity: Granularity) -> np.ndarray:
    """Return the amax of each tile, cut out of the matrix one by one: no padding anywhere."""
    rows, cols = x.shape
    height, width = granularity.rows or rows, granularity.cols or cols
    tiles = [[x[r : r + height, c : c + width] for c in range(0, cols, width)] for r in range(0, rows, height)]
    return np.array([[np.abs(tile).max() for tile in line] for line in tiles])


@pytest.mark.parametrize("name", NAMED)
def test_names_and_granularities_belong_together(name):
    assert granularity_named(name) == NAMED[name]
    assert NAMED[name].name == name


@given(st.integers(1, 999), st.integers(1, 999))
@settings(deadline=None, derandomize=True, max_examples=30)
def test_any_tile_has_a_name(rows, cols):
    granularity = Granularity(rows, cols)
    assert granularity_named(granularity.name) == granularity


@pytest.mark.parametrize("name", ["", "rows", "128", "0x128", "128x", "x128", "-1x128", "1X128", "1x128 ", "1.5x2"])
def test_unknown_name(name):
    with pytest.raises(ConfigError, match="unknown granularity"):
        granularity_named(name)


def test_unknown_name_says_what_was_meant():
    with pytest.raises(ConfigError, match=r"Did you mean 'tensor'\?"):
        granularity_named("tensr")


@every_granularity
def test_transposed_twice_is_itself(granularity):
    assert granularity.transposed.transposed == granularity


@every_shape
@every_granularity
def test_scale_shape_counts_ragged_tiles(granularity, shape):
    expected = amax_by_loops(np.ones(shape), granularity).shape
    assert granularity.scale_shape(*shape) == expected
    assert granularity.transposed.scale_shape(*shape[::-1]) == expected[::-1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tensor", (1, 1)),
        ("row", (300, 1)),
        ("column", (1, 200)),
        ("1x128", (300, 2)),
        ("128x128", (3, 2)),
        ("1x32", (300, 7)),
    ],
)
def test_scale_shape_of_the_table(name, expected):
    assert granularity_named(name).scale_shape(300, 200) == expected


@every_shape
@every_granularity
def test_untile_undoes_tiles(granularity, shape):
    x = torch.randn(shape)
    assert torch.equal(granularity.untile(granularity.tiles(x), *shape), x)


@every_shape
@every_granularity
def test_expand_gives_each_element_the_scale_of_its_tile(granularity, shape):
    rows, cols = shape
    height, width = granularity.rows or rows, granularity.cols or cols
    scale = torch.arange(1.0, 1 + np.prod(granularity.scale_shape(*shape))).reshape(granularity.scale_shape(*shape))
    expected = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :cols]
    assert torch.equal(granularity.expand(scale, *shape), expected)


@pytest.mark.covering(2)
@every_shape
@every_granularity
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_amax_of_every_tile(granularity, shape, dtype):
    x = torch.randn(shape).to(dtype)
    amax = tile_amax(x, granularity)
    assert amax.dtype == torch.float32
    np.testing.assert_array_equal(amax.numpy(), amax_by_loops(x.float().numpy(), granularity))


@every_granularity
def test_amax_leaves_nan_and_infinities_out(granularity):
    x = torch.randn(130, 140)
    poisoned = x.clone()
    poisoned[3, 5], poisoned[129, 139], poisoned[64, 0] = torch.nan, torch.inf, -torch.inf
    x[3, 5] = x[129, 139] = x[64, 0] = 0.0
    assert torch.equal(tile_amax(poisoned, granularity), tile_amax(x, granularity))


@every_granularity
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_amax_of_an_empty_matrix(granularity, shape):
    assert tile_amax(torch.empty(shape), granularity).shape == granularity.scale_shape(*shape)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@every_granularity
def test_rule_6_padding_never_enters_a_scale(granularity, fmt):
    # Tiny values beside a ragged edge: had anything but zeros been filled in, or counted, it would decide the amax.
    x = torch.randn(130, 257) * 2.0**-100
    quantized = quantize(x, fmt, granularity)
    largest = torch.tensor(amax_by_loops(x.numpy(), granularity))
    assert quantized.scale.shape == largest.shape
    assert bool((largest / quantized.scale > fmt.max / 2).all()), "the scale fits the tile's own amax"
    assert bool((largest / quantized.scale <= fmt.max).all())


@pytest.mark.parametrize("granularity", [Granularity(128, None), Granularity(None, 16), Granularity(3, 5), PER_ROW])
def test_every_name_is_read_back(granularity):
    assert granularity_named(granularity.name) == granularity
