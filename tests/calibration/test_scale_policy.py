"""Scales against the rule, and what is said of them against real codes."""

import math

import pytest
import torch

from octavo.calibration import MagnitudeHistogram, ScalePolicy
from octavo.calibration.scale_policy import FINER, FLUSHED
from octavo.errors import ConfigError
from octavo.kernels import QuantSpec, quantize_with_scale
from octavo.kernels.quantize_with_scale import ScaleRef
from octavo.nn.observe import count_lost
from octavo.numerics import format_of
from octavo.recipes import Operand

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def spread(octaves: float, count: int = 20000) -> torch.Tensor:
    """Magnitudes spread evenly over so many octaves below 1, BF16."""
    x = torch.exp2(-octaves * torch.rand(count)) * torch.randn(count).sign()
    x[0] = 1.0
    return x.bfloat16().view(200, -1)


def seen(*tensors: torch.Tensor) -> MagnitudeHistogram:
    spectrum = MagnitudeHistogram()
    for tensor in tensors:
        spectrum.add(tensor)
    return spectrum


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scaling", ["float32", "power_of_two"])
@pytest.mark.parametrize("margin", [0, 1, 3])
def test_the_largest_value_and_a_margin(format, scaling, margin):
    operand = Operand(format=format, scaling=scaling, granularity="tensor")
    found = ScalePolicy(margin=margin).scale(seen(torch.tensor([0.3, -5.25])), operand)
    exact = 5.25 / LARGEST[format]
    if scaling == "power_of_two":
        exact = 2.0 ** math.ceil(math.log2(exact))
    assert found.scale == float(torch.tensor(exact)) * 2**margin
    assert (found.format, found.scaling, found.amax) == (format, scaling, 5.25)
    found.check("a", operand)


def test_a_percentile_leaves_outliers_out():
    x = torch.full((1000,), 2.0)
    x[:5] = 100.0
    operand = Operand(scaling="float32")
    found = ScalePolicy(by="percentile", percentile=99.0, margin=0).scale(seen(x), operand)
    assert 2.0 / 448 <= found.scale <= 2.0 / 448 * 1.008
    assert (found.statistics.saturated, found.amax) == (0.005, 100.0)
    all_of_it = ScalePolicy(by="percentile", percentile=100, margin=0).scale(seen(x), operand)
    assert all_of_it.scale == float(torch.tensor(100 / 448))


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("octaves", [4, 18, 34])
@pytest.mark.parametrize("scaling", ["float32", "power_of_two"])
@pytest.mark.parametrize(
    "choice", [ScalePolicy(), ScalePolicy(margin=4), ScalePolicy(by="percentile", percentile=90, margin=0)], ids=str
)
def test_what_is_said_of_a_scale_happens_to_the_codes(format, octaves, scaling, choice):
    x = spread(octaves)
    x[3, :7] = 0
    x[5, :60] = torch.exp2(-torch.arange(60.0)).bfloat16()  # ties, where scales are powers of two
    found = choice.scale(seen(x), Operand(format=format, scaling=scaling))
    stored = torch.tensor([[found.scale, 0.0]])
    made, _ = quantize_with_scale([x], ScaleRef(stored, 0), QuantSpec(format, "tensor", scaling, "nearest"), None)
    flushed, saturated, _ = count_lost(x, made).tolist()
    codes, fmt = made.codes.float().abs(), format_of(made.codes)
    subnormal = ((codes > 0) & (codes < fmt.smallest_normal)).sum()
    said = found.statistics
    counts = [round(share * x.numel(), 6) for share in (said.flushed, said.saturated, said.subnormal, said.zero)]
    assert counts == [flushed, saturated, subnormal, 7]
    assert (said.elements, said.batches) == (x.numel(), 1)


def test_the_scales_that_fit_are_those_that_flush_few():
    x, operand = spread(17), Operand(scaling="float32")
    found = ScalePolicy(margin=0).scale(seen(x), operand)
    assert found.scale == found.statistics.lowest
    highest = found.statistics.highest
    for scale, fits in ((highest, True), (highest * 1.02, False)):
        share = float((x.float().abs() <= scale * 2.0**-10).float().mean())
        assert (share <= FLUSHED) == fits


@pytest.mark.parametrize(
    ("octaves", "suggested"), [(10, "e4m3"), (16, "e4m3"), (22, "e5m2"), (30, "e5m2"), (40, FINER)]
)
def test_the_narrowest_format_is_suggested(octaves, suggested):
    found = ScalePolicy().scale(seen(spread(octaves)), Operand(scaling="float32"))
    assert found.statistics.suggested == suggested


def test_the_batches_are_told_apart():
    batches = [torch.tensor([amax]) for amax in (3.0, 1.0, 2.0)]
    found = ScalePolicy().scale(seen(*batches), Operand())
    assert (found.statistics.batch_amax, found.amax) == ((1.0, 2.0), 3.0)


@pytest.mark.parametrize(("tail", "least", "most"), [("power law", -0.3, 0.3), ("normal", 0.0, 1.0)])
def test_an_extreme_is_the_largest_of_so_many_batches(tail, least, most):
    """Against the median of the largest of that many batches, drawn. A lighter tail gets up to a bit more."""
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        x = torch.empty(count, 256)
        return (
            torch.exp2(x.exponential_(4, generator=generator))
            if tail == "power law"
            else x.normal_(generator=generator)
        )

    largest = float(torch.stack([draw(1024).abs().amax() for _ in range(20)]).median())
    spectra = [seen(*draw(32)) for _ in range(20)]
    found = [ScalePolicy(by="extreme", horizon=1024, margin=0).amax(spectrum) for spectrum in spectra]
    assert all(one >= spectrum.amax for one, spectrum in zip(found, spectra, strict=True))
    assert least < sum(math.log2(one / largest) for one in found) / len(found) < most


def test_a_steady_tensor_gets_less_headroom_than_one_whose_maxima_jump():
    policy = ScalePolicy(by="extreme", horizon=1000)
    steady = seen(*(torch.tensor([1.0 + 0.01 * (i % 2)]) for i in range(8)))
    jumping = seen(*(torch.tensor([1.01 if i else 0.1]) for i in range(8)))
    assert steady.amax == jumping.amax and 1.01 <= policy.amax(steady) < 1.1 and policy.amax(jumping) > 8
    assert policy.amax(seen(torch.ones(9))) == 1.0, "one batch has no spread"
    larger = ScalePolicy(by="extreme", horizon=8000)
    assert larger.amax(jumping) > policy.amax(jumping), "a batch eight times as large"


def test_tensors_with_one_scale_have_the_largest_of_each_batch_together():
    one, other = seen(*torch.tensor([[1.0], [4.0]])), seen(*torch.tensor([[2.0], [3.0]]))
    assert MagnitudeHistogram.of([one, other]).batch_amax() == [2.0, 4.0]


def test_zeros_have_no_scale():
    assert ScalePolicy().scale(seen(torch.zeros(5)), Operand()) is None
    assert ScalePolicy(by="percentile").scale(seen(torch.zeros(5)), Operand()) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"by": "mean"}, "'max', 'percentile' or 'extreme', not 'mean'"),
        ({"horizon": 0.5}, "at least 1"),
        ({"percentile": 0}, "above 0"),
        ({"margin": 9}, "0 to 8"),
    ],
)
def test_wrong_choices(wrong, message):
    with pytest.raises(ConfigError, match=message):
        ScalePolicy(**wrong)
