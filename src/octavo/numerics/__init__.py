"""The numbers: formats, granularities, scales, quantise, error measures. Plain PyTorch: the specification."""

from octavo.numerics.error import cosine_of, inner_products, sqnr_db, sqnr_per_row_db
from octavo.numerics.formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    NARROW,
    Format,
    format_named,
    format_of,
)
from octavo.numerics.granularity import (
    PER_COLUMN,
    PER_ROW,
    PER_TENSOR,
    BLOCK_128x128,
    Granularity,
    GROUP_1x32,
    TILE_1x128,
    granularity_named,
    tile_amax,
)
from octavo.numerics.quantize import Quantized, Rounding, dequantize, quantize, random_bits, random_words, to_codes
from octavo.numerics.scaling import Scaling, from_e8m0, scale_from_amax, to_e8m0

__all__ = [
    "E4M3",
    "E5M2",
    "E8M0",
    "FORMATS",
    "NARROW",
    "PER_COLUMN",
    "PER_ROW",
    "PER_TENSOR",
    "BLOCK_128x128",
    "Format",
    "GROUP_1x32",
    "Granularity",
    "Quantized",
    "Rounding",
    "Scaling",
    "TILE_1x128",
    "cosine_of",
    "dequantize",
    "format_named",
    "format_of",
    "from_e8m0",
    "granularity_named",
    "inner_products",
    "quantize",
    "random_bits",
    "random_words",
    "scale_from_amax",
    "sqnr_db",
    "sqnr_per_row_db",
    "tile_amax",
    "to_codes",
    "to_e8m0",
]
