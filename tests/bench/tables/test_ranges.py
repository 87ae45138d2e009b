from __future__ import annotations

import torch

from octavo.numerics import E4M3, E5M2
from octavo_bench import facts as ranges


def test_every_figure_is_that_of_the_format() -> None:
    for fmt, line in zip((E4M3, E5M2), ranges.range_table().splitlines()[2:], strict=True):
        values = fmt.decode(torch.arange(256, dtype=torch.uint8))
        finite = values[values.isfinite() & (values > 0)]
        name, largest, normal, smallest, zero, *decades, margin, room = (cell.strip() for cell in line.split("|")[1:-1])
        assert name == fmt.name.upper() and float(largest) == finite.max()
        assert smallest == f"2^{int(finite.min().log2())}" and zero == f"2^{int(finite.min().log2()) - 1}"
        exponent = int(normal.removeprefix("2^"))
        spans = [float((finite.max() / least).log10()) for least in (torch.tensor(2.0**exponent), finite.min())]
        assert [float(cell.split()[0]) for cell in decades] == [round(span, 1) for span in spans]
        bits = int(margin.split()[2])
        assert room == f"{float(largest) / 2**bits:g} to {largest}"
        assert spans[0] - bits * 0.30103 >= ranges.DECADES


def test_the_default_margin_is_within_the_recommended_one() -> None:
    from octavo.calibration import ScalePolicy

    assert ScalePolicy().margin == ranges.most_margin(E4M3) == 1
