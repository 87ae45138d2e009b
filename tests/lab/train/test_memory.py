from dataclasses import replace

import pytest
import torch
from torch import nn

from octavo import Policy, convert, scales
from octavo.kernels.runtime.dispatch import planning_for
from octavo.lab.memory import Forecast
from octavo.lab.models import build, count_parameters
from octavo.lab.models.config import ModelConfig
from octavo.lab.train.config import ParallelConfig, assemble, load_preset
from octavo.lab.train.memory import forecast_run, largest_model, largest_of, peaks, scaled
from octavo.lab.train.setup import make_states

CONFIG = assemble(
    load_preset("tiny", cuda=False), ("test", {"model": {"layers": 1}, "run": {"compile": "off", "baseline": False}})
)
LLAMA_1B = ModelConfig(vocab=128256, dim=2048, ffn=8192, heads=32, kv_heads=8, layers=16, sequence=4096)


def test_the_largest_model_fits_and_the_next_one_does_not() -> None:
    def forecast(model: ModelConfig) -> Forecast:
        with torch.device("meta"):
            parameters = count_parameters(build(model, 0))
        return Forecast({"weights": 16 * parameters}, 0, parameters)

    found = largest_of(LLAMA_1B, forecast, 139)
    assert found is not None
    model, fitting = found
    assert fitting.peak <= 139 * 2**30 < forecast(scaled(LLAMA_1B, model.key_value_heads + 1)).peak
    assert largest_of(LLAMA_1B, forecast, 0.01) is None


def test_the_largest_model_alone_is_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.kernels.runtime.ledger._warned", set())
    tried: set[str] = set()
    with planning_for("h200"):
        found = largest_model(CONFIG, 0.07, report=lambda doing, _: tried.add(doing.partition(",")[0]))
    assert found is not None and len(tried) > 2
    layers = 7 * found[0].layers
    said = f"octavo.convert: Nothing will run in FP8: too small to gain ({layers} of {layers + 1} layers)"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_a_run_is_forecast_with_all_its_models() -> None:
    alone = forecast_run(CONFIG)
    both = forecast_run(replace(CONFIG, run=replace(CONFIG.run, baseline=True)))
    with torch.device("meta"):
        assert alone.parameters == both.parameters // 2 == count_parameters(build(CONFIG.model, 0))
    assert both.by_kind["states"] == pytest.approx(2 * alone.by_kind["states"], rel=0.01)


def test_a_forecast_is_of_the_steps_that_need_most() -> None:
    config = CONFIG.with_run(recipe="folded", batch=64, min_gain=0.0)
    shares: list[float] = []
    peaks = {"folded": forecast_run(config).peak}
    for recipe in ("rowwise_bf16_fprop", "bf16"):
        peaks[recipe] = forecast_run(config.with_run(recipe=recipe)).peak
        ends = config.with_run(last_share=0.3, last_recipe=recipe)
        assert forecast_run(ends, report=lambda _, share: shares.append(share)).peak == peaks[recipe]
    assert peaks["folded"] < peaks["rowwise_bf16_fprop"] < peaks["bf16"]
    assert forecast_run(config.with_run(bf16_first_steps=1)).peak == peaks["bf16"]
    sharded = [
        forecast_run(config.with_run(**run), gpus=2).peak for run in ({}, {"last_share": 0.1, "last_recipe": "folded"})
    ]
    assert sharded[0] < sharded[1]  # which gathers values in all steps
    deep = replace(config, model=replace(config.model, layers=3))  # of which FSDP2 has two blocks at a time
    assert (
        forecast_run(replace(deep, parallel=ParallelConfig(reshard=False)), gpus=2).peak
        > forecast_run(deep, gpus=2).peak
    )
    assert shares[:6] == sorted(shares[:6]) and shares[0] == 0.0 and 0.5 < shares[5] < 1.0


def test_a_forecast_leaves_a_model_that_trains_alone() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    convert(model, "delayed", policy=Policy(min_gain=0))
    model(torch.randn(16, 32)).sum().backward()
    book = scales(model)
    assert book is not None
    before = book.state_dict()
    forecast_run(CONFIG)
    assert all(torch.equal(now, before[name]) for name, now in book.state_dict().items())


@pytest.mark.parametrize("groups", [1, 3, 8, 15, 24])
def test_a_scaled_model_has_the_proportions_of_its_family(groups: int) -> None:
    model = scaled(LLAMA_1B, groups)
    assert (model.heads, model.head_dim) == (4 * model.key_value_heads, 64)
    assert model.ffn_dim == 4 * model.dim == 4 * 256 * groups
    assert model.layers == 2 * groups
    assert scaled(LLAMA_1B, 8) == LLAMA_1B


def test_there_is_nothing_to_compare_without_a_gpu() -> None:
    assert peaks(CONFIG, torch.device("cpu")) == {"peak_gib": None, "predicted_peak_gib": None}


@pytest.mark.gpu
def test_a_step_of_a_run_takes_on_a_gpu_what_was_predicted() -> None:
    model = replace(CONFIG.model, dim=1024, ffn=4096, layers=4, heads=8, kv_heads=8)
    config = replace(CONFIG, model=model, run=replace(CONFIG.run, batch=64, accumulate=1))
    torch._C._cuda_clearCublasWorkspaces()  # an earlier test's would not be counted
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (lane,), _ = make_states(config, torch.device("cuda"))
    tokens = torch.zeros(64, config.data.sequence, dtype=torch.int64, device="cuda")
    for step in (1, 2):
        lane.step(tokens, tokens, step=step, lr=1e-3)
    peak = torch.cuda.max_memory_allocated() - before
    assert forecast_run(config).peak == pytest.approx(peak, rel=0.05)
