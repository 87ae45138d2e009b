"""Some of the sixty classes of models: exactly what should runs in FP8. `classes/measure.py` has all of them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "classes"))

from cases import CASES
from measure import is_there, measure

LIBRARIES = ["GPT2LMHeadModel", "Gemma2ForCausalLM", "BigBirdPegasusForConditionalGeneration", "ViTMAEForPreTraining"]


@pytest.mark.parametrize("name", [*LIBRARIES, *(name for name, case in CASES.items() if case.package == "written")])
def test_what_should_run_in_fp8_does(name):
    if not is_there(CASES[name]):
        pytest.skip(f"needs {CASES[name].package}")
    result = measure(CASES[name])
    assert result.right and result.share == 1 and not result.unsaid, (result.wrong, result.unsaid)


def test_there_are_sixty():
    assert len(CASES) == 60
