"""An oracle that shares no code with Octavo: ml_dtypes holds the values, NumPy does the rest."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

TWIN = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def nearest_codes(x: np.ndarray, fmt: str) -> np.ndarray:
    """Round FP32 values to the nearest code (uint8): ties to even, finite values saturate, infinities are NaN."""
    largest = float(ml_dtypes.finfo(TWIN[fmt]).max)
    saturated = np.where(np.isfinite(x), np.clip(x, -largest, largest), np.nan).astype(np.float32)
    return saturated.astype(TWIN[fmt]).view(np.uint8)


def quantise(x: np.ndarray, fmt: str, tile: tuple[int, int], scaling: str) -> tuple[np.ndarray, np.ndarray]:
    """Quantise an FP32 matrix tile by tile, each cut out on its own: return codes (uint8) and scales, by loops."""
    largest = float(ml_dtypes.finfo(TWIN[fmt]).max)
    (rows, cols), (height, width) = x.shape, tile
    codes = np.empty(x.shape, np.uint8)
    scales = np.empty((-(-rows // height), -(-cols // width)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
            finite = np.abs(x[part][np.isfinite(x[part])]).astype(np.float64)
            ratio = max(finite, default=0.0) / largest
            if ratio == 0:
                scale = inverse = np.float64(1)
            elif scaling == "power_of_two":
                mantissa, exponent = np.frexp(ratio)  # ratio = mantissa * 2^exponent, 0.5 <= mantissa < 1
                scale = max(np.ldexp(1.0, exponent - (mantissa == 0.5)), 2.0**-126)
                inverse = 1 / scale
            else:
                scale, inverse = max(ratio, 2.0**-126), min(1 / ratio, 2.0**126)
            scales[i, j] = scale
            codes[part] = nearest_codes(x[part] * np.float32(inverse), fmt)
    return codes, scales


@pytest.fixture
def oracle() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    return quantise


@pytest.fixture
def oracle_codes() -> Callable[..., np.ndarray]:
    return nearest_codes
