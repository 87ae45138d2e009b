from __future__ import annotations

import pytest

from octavo.doctor.machine.variables import SLOW, judge


@pytest.mark.parametrize("name", SLOW)
def test_a_variable_that_makes_a_run_slow_is_named_with_the_reason(name: str) -> None:
    found = judge({name: SLOW[name][0][0], "HOME": "/home/me"})
    assert found.verdict == "warning" and found.seen.startswith(f"{name}=") and SLOW[name][1] in found.seen, found
    assert f"unset {name}" in found.remedy


def test_other_values_and_other_variables_are_well() -> None:
    finding = judge({"OCTAVO_TRITON": "1", "CUDA_LAUNCH_BLOCKING": "0", "HOME": "/home/me"})
    assert finding.verdict == "ok", finding
    assert judge({}).seen == "none in force that matters"
