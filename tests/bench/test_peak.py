import pytest
import torch

from octavo.errors import RunError
from octavo_bench.memory import BASELINE, CASES, KIND, LEANEST, bench_memory, predict
from octavo_bench.workloads import WORKLOADS

SMALL = WORKLOADS["tiny-model"].but(batch=2, sequence=512, dim=256, ffn=1024, vocab=1024)


def test_the_leanest_case_takes_the_least() -> None:
    found = {name: predict(SMALL, CASES[name]) for name in (BASELINE, LEANEST)}
    assert found[LEANEST].peak < found[BASELINE].peak
    sixteen = found[BASELINE]
    assert (sixteen.by_kind["weights"] + sixteen.by_kind["states"]) / sixteen.parameters == pytest.approx(14, rel=0.02)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_says_what_to_do_without_a_gpu() -> None:
    with pytest.raises(RunError, match="octavo plan --memory"):
        next(bench_memory(SMALL))


def test_a_table_shows_what_was_measured_beside_what_was_predicted() -> None:
    rows = (
        {"workload": "w", "implementation": "a", "peak_gib": 40.0, "predicted_gib": 41.0, "parameters": 2 * 10**9},
        {"workload": "w", "implementation": "b", "peak_gib": 10.0, "predicted_gib": 9.0},
        {"workload": "w", "implementation": "c", "error": "OutOfMemoryError: no"},
    )
    shown = KIND.markdown(rows).splitlines()
    assert "| 2.00 B | 40.00 | 41.00 | +2.5% | 0% |" in shown[2]
    assert "| 10.00 | 9.00 | -10.0% | 75% |" in shown[3]
    assert "failed" in shown[4]
