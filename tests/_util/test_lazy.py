"""Packages whose names load on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import octavo
from octavo._util.lazy import lazy


def test_names_modules_and_names_that_differ_there() -> None:
    attribute = lazy("octavo", {"conversion": "Policy plan=make_plan", "optim": ""})
    assert attribute("Policy") is octavo.Policy and attribute("plan") is octavo.plan
    assert attribute("optim") is octavo.optim
    with pytest.raises(AttributeError, match="module 'octavo' has no attribute 'make_plan'"):
        attribute("make_plan")


def test_a_module_is_an_attribute_before_any_of_its_names() -> None:
    code = "import octavo, sys; assert 'torch' not in sys.modules; octavo.calibration.Updates(every=1)"
    subprocess.run([sys.executable, "-c", code], check=True)
