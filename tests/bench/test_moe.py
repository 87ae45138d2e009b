"""The benchmark of experts: each row has its figures, and one that fails does not end the others."""

from octavo_bench import moe
from octavo_bench.results import KINDS


def test_rows_of_a_layer(monkeypatch):
    monkeypatch.setattr(moe, "WAYS", (moe.Way(moe.RIVAL), moe.Way("octavo", "folded"), moe.Way("wrong", "tensorwise")))
    rows = moe.bench_layers(moe.SMALL, "cpu", 1, lambda row: None)
    rival, ours, wrong = rows
    assert all(KINDS["moe"].keys() <= row.keys() and row["ratio_to_bf16"] > 0 for row in (rival, ours))
    assert rival["ratio_to_bf16"] == 1.0 and ours["kept_mib"] <= rival["kept_mib"]
    assert "Grouped GEMMs have a scale per row" in wrong["error"]
