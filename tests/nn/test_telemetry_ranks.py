"""What several ranks measured, as one: against the statistics of all their elements."""

import pytest
import torch

from octavo.kernels import quantize
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.sample import BINS, DETAILED, PHASE, SAMPLED, STATS, WIDTH, SampleInput
from octavo.kernels.sample.reference import sample
from octavo.nn.telemetry_ranks import combined
from octavo.numerics import dequantize

TARGET = QuantSpec("e4m3", "row", "power_of_two")


def row_of(x):
    """Return what a rank measures of x (16, C), all of whose rows are sampled."""
    row = torch.full((WIDTH + BINS,), torch.nan)
    row[PHASE], row[DETAILED] = 0, 1
    if x is not None:
        sample(SampleInput(x, quantize(x, *TARGET).scale, TARGET, tied=True), row)
    return row


def stat(row, name):
    return float(row[STATS.index(name)])


def test_it_is_what_one_rank_says_of_all_elements():
    torch.manual_seed(0)
    parts = [torch.randn(16, columns) * torch.logspace(-7, 0, 16)[:, None] for columns in (24, 40, 40)]
    found = combined(torch.stack([row_of(part)[None] for part in parts]))[0]
    whole = torch.cat([part.flatten() for part in parts]).double()
    codes = [quantize(part, *TARGET) for part in parts]
    deviation = whole - whole.mean()
    assert stat(found, "amax") == whole.abs().max()
    assert stat(found, "scale") == max(code.scale.max() for code in codes)
    assert stat(found, "mean") == pytest.approx(float(whole.mean()), abs=1e-7)
    assert stat(found, "variance") == pytest.approx(float(deviation.square().mean()), rel=1e-5)
    kurtosis = deviation.pow(4).mean() / deviation.square().mean() ** 2
    assert stat(found, "kurtosis") == pytest.approx(float(kurtosis), rel=0.05)  # but for the means of the ranks
    subnormal = torch.cat([code.codes.float().abs().flatten() for code in codes])
    share = ((subnormal > 0) & (subnormal < 2**-6)).double().mean()
    assert stat(found, "subnormal") == pytest.approx(float(share), rel=1e-6)
    assert found[SAMPLED] == len(whole)
    assert found[WIDTH:].tolist() == sum(row_of(part)[WIDTH:] for part in parts).tolist()
    ratios = [
        float((dequantize(code) - part).square().sum() / part.square().sum())
        for code, part in zip(codes, parts, strict=True)
    ]
    assert stat(found, "sqnr") == pytest.approx(float(-10 * torch.tensor(ratios).mean().log10()), abs=1e-4)


def test_one_rank_that_looked_at_nothing_takes_no_part():
    x = torch.randn(16, 24)
    alone = row_of(x)
    found = combined(torch.stack([row_of(None)[None], alone[None]]))[0]
    torch.testing.assert_close(found[: len(STATS)], alone[: len(STATS)], rtol=1e-6, atol=1e-7)
    assert torch.equal(found[WIDTH:], alone[WIDTH:])
    nobody = combined(torch.stack([row_of(None)[None], row_of(None)[None]]))[0]
    assert nobody[: len(STATS)].isnan().all()
    assert nobody[WIDTH:].isnan().all()


def test_what_is_not_known_stays_unknown_and_one_nan_is_seen():
    x = torch.randn(16, 24)
    rows = [row_of(x), row_of(x.index_fill(0, torch.tensor([3]), torch.nan))]
    for row in rows:
        row[STATS.index("flushed")] = torch.nan  # of codes
    found = combined(torch.stack([row[None] for row in rows]))[0]
    assert stat(found, "nonfinite") == 1 / 16
    assert found[STATS.index("flushed")].isnan()
    assert not found[STATS.index("subnormal")].isnan()
    assert combined(torch.stack([row[None, :WIDTH] for row in rows])).shape == (1, WIDTH)
