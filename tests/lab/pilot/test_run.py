"""A pilot on a CPU: losses are measured on the same batches, times are predicted for a GPU."""

from __future__ import annotations

import json
import re

import pytest
import torch

from octavo.errors import ConfigError
from octavo.kernels.runtime.devices import H200
from octavo.lab.monitor.system import SystemProbe
from octavo.lab.pilot import Settings, measuring, open_subject, run_pilot
from octavo.lab.pilot.judging import advise
from octavo.lab.pilot.measuring import Conditions, Flops, count_flops, measure
from octavo.lab.pilot.predicting import launch_ms, plan_for, products_ms
from octavo.lab.pilot.report import to_dict, to_html, to_text

CPU = torch.device("cpu")


def test_flops_are_those_of_the_layers(python_file):
    total, outside, rows, _ = count_flops(open_subject(python_file))
    layers = 32 * (64 * 128 + 128 * 16)
    assert rows == 32 and outside == 0 and total == 2 * (3 * layers - 32 * 64 * 128)  # no dgrad of the first layer


def test_layers_that_store_their_weight_transposed_are_linear_layers(python_file):
    """`Conv1D` of transformers, as in GPT-2."""
    pytest.importorskip("transformers")
    linear = open_subject(python_file)
    text = python_file.read_text().replace("nn.Linear(64, 128)", "Conv1D(128, 64)")
    python_file.write_text(f"from transformers.pytorch_utils import Conv1D\n{text}")
    workload = open_subject(python_file)
    assert count_flops(workload) == count_flops(linear)
    how = Conditions(subject=workload, device=CPU, steps=2, flops=Flops(1e9, 0.0, 32))
    found, plan = measure("rowwise", workload.build(), how)
    assert not found.failed and plan.fp8_layers == 1 and 0.01 < found.layer_errors["0"] < 0.06


def test_a_layer_may_be_given_its_input_by_name(python_file):
    text = python_file.read_text().replace("model(batch[0])", "model[2](input=model[1](model[0](input=batch[0])))")
    python_file.write_text(text)
    workload = open_subject(python_file)
    found, _ = measure("rowwise", workload.build(), Conditions(subject=workload, device=CPU, steps=2))
    assert not found.failed and 0.01 < found.layer_errors["0"] < 0.06


def test_bf16_and_a_recipe_see_the_same_batches(python_file):
    workload = open_subject(python_file)
    how = Conditions(subject=workload, device=CPU, steps=6, lr=1e-2, flops=Flops(1e9, 0.0, 32))
    model = workload.build()
    before = [parameter.clone() for parameter in model.parameters()]
    base, none = measure("bf16", model, how)
    found, plan = measure("rowwise", model, how)
    fp16, _ = measure("fp16", model, how)
    assert 0 < max(abs(one - other) for one, other in zip(fp16.losses, base.losses, strict=True)) < 0.02
    assert none is None and plan.fp8_layers == 1, "16 features are too few"
    assert len(base.losses) == len(found.losses) == 6 and base.losses[5] < base.losses[0]
    assert 0 < abs(found.losses[0] - base.losses[0]) < 0.02 * base.losses[0]
    assert 0.01 < found.layer_errors["0"] < 0.06 and 0.97 < found.gradient_cosines["0"] < 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert base.phases.keys() == {"data", "forward", "backward", "optimizer"}
    assert base.step_ms == pytest.approx(sum(base.phases.values())) and base.tflops == pytest.approx(1 / base.step_ms)


def test_the_energy_of_steps_before_those_that_are_timed_does_not_count(python_file, monkeypatch):
    """The host may be several steps ahead of a GPU: the counter of energy is read when it has done them."""
    order: list[str] = []

    class Probe(SystemProbe):
        def __init__(self, gpu: int | None) -> None:
            order.append("counter")
            super().__init__(gpu)

    monkeypatch.setattr(measuring, "SystemProbe", Probe)
    monkeypatch.setattr(measuring, "synchronize", lambda device: order.append("done"))
    workload = open_subject(python_file)
    measure("bf16", workload.build(), Conditions(subject=workload, device=CPU, steps=5))
    assert order == ["done", "counter"]


def test_dropout_is_the_same_in_every_precision(python_file):
    python_file.write_text(python_file.read_text().replace("nn.ReLU()", "nn.Dropout(0.5)"))
    workload = open_subject(python_file)
    how, model, state = Conditions(subject=workload, device=CPU, steps=4), workload.build(), torch.get_rng_state()
    (first, _), (second, _) = measure("bf16", model, how), measure("bf16", model, how)
    assert first.losses == second.losses and torch.equal(state, torch.get_rng_state())


def test_a_precision_that_fails_says_so(python_file):
    python_file.write_text(python_file.read_text().replace("model(batch[0])", "model(batch[0][:, :-1])"))
    workload = open_subject(python_file)
    found, _ = measure("bf16", workload.build(), Conditions(subject=workload, device=CPU, steps=2))
    assert found.failed.startswith("RuntimeError: ") and found.losses == []


def test_numbers_that_are_not_known_are_null_in_json(python_file):
    """The error of a single gap is not known; a loss may be NaN."""
    pilot = run_pilot(open_subject(python_file), Settings(recipes=("folded",), steps=2, device="cpu"))
    pilot.measured["folded"].losses[0] = float("nan")
    found = json.loads(json.dumps(to_dict(pilot), allow_nan=False))["measured"][2]
    assert found["loss_gap_percent"][1] is None and found["losses"][0] is None and found["losses"][1] > 0


def test_the_report_on_a_cpu_predicts_for_a_gpu(python_file, tmp_path):
    pilot = run_pilot(open_subject(python_file), Settings(recipes=("rotated",), steps=4, device="cpu", gpu="h100"))
    text, data = to_text(pilot), json.loads(json.dumps(to_dict(pilot)))
    assert "times and memory predicted for H100" in text and "not known on this machine: data loading" in text
    assert "adopt: no" in text and "too small to gain" in text
    assert [lane["precision"] for lane in data["measured"]] == ["bf16", "fp16", "rotated"]
    assert not data["recommendation"]["adopts"] and [lane["speedup"] for lane in data["measured"]] == [1.0] * 3
    assert pilot.gap("fp16") is not None and abs(pilot.gap("fp16")[0]) < 1
    pytest.importorskip("plotly")
    page = to_html(pilot, tmp_path / "new" / "pilot.html").read_text("utf-8")
    assert "Plotly.newPlot" in page and "src=" not in page.partition("<script>")[0] and "too small to gain" in page


def test_no_steps_predict_from_shapes_alone(tmp_path):
    file = tmp_path / "large.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "def build(): return nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)])\n"
        "def batches(): yield (torch.ones(1, 1).expand(16384, 4096),)\n"
        "def loss(model, batch): return model(batch[0]).mean()\n"
    )
    workload = open_subject(file)
    pilot = run_pilot(workload, Settings(recipes=("folded", "block"), steps=0, device="cpu"))
    assert pilot.adopts and pilot.best == "folded" and pilot.parameters == 4 * 4096 * 4097
    plan = plan_for("folded", Conditions(subject=workload, device=CPU), "h200")
    base = products_ms(plan, 16384, H200, in_bf16=True)
    assert pilot.speedup("folded") == pytest.approx(1.12 * base / (products_ms(plan, 16384, H200) + 0.12 * base))
    assert pilot.base.peak_gib > 4 * 4 * 4096 * 4096 * 3 / 2**30  # weights and moments


def test_a_small_model_takes_as_long_as_its_launches(python_file):
    """Its kernels take microseconds: without launches, hundreds of millions of samples per second were predicted."""
    workload = open_subject(python_file)
    flops = count_flops(workload)
    # Forward: 2 addmm, ReLU, log_softmax, nll_loss; backward: ones_like, the last three's, 3 mm, 2 sums of biases.
    assert flops.launches == 14
    pilot = run_pilot(workload, Settings(recipes=("folded",), steps=0, device="cpu", gpu="h200"))
    assert pilot.base.step_ms == pytest.approx(launch_ms(14, None)) and pilot.base.phases["idle"] > 0.98 * 0.42
    (host,) = (advice for advice in advise(pilot) if advice.about == "host")
    assert host.decision.startswith("fewer launches") and re.search(r"idle for (99|100)% of it", host.reason)
    plan = plan_for("folded", Conditions(subject=workload, device=CPU), "h200")
    assert launch_ms(14, plan) == pytest.approx(0.42 + 0.3 * plan.fp8_layers)


@pytest.mark.parametrize("steps", [0, 4])
def test_times_of_a_cpu_do_not_stand_in_for_those_of_a_gpu_where_flops_are_unknown(python_file, steps):
    reads_values = "    assert batch[0].amax().item() < 99\n    return nn.functional"
    python_file.write_text(python_file.read_text().replace("    return nn.functional", reads_values))
    pilot = run_pilot(open_subject(python_file), Settings(recipes=("folded",), steps=steps, device="cpu", gpu="h200"))
    for found in pilot.measured.values():
        assert found.step_ms is found.tokens_per_s is found.tflops is found.peak_gib is None and not found.times
        assert len(found.losses) == steps and not found.failed
    assert pilot.speedup("folded") == 0 and not pilot.adopts
    assert "FLOPs are not known, nor time and memory on the GPU" in to_text(pilot)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_model_may_read_values_while_it_is_built(python_file, steps):
    """Rates of stochastic depth are often made so. Without values, the FLOPs are counted all the same."""
    reads_values = "    rates = [x.item() for x in torch.linspace(0, 0.1, 3)]\n    return nn.Sequential"
    python_file.write_text(python_file.read_text().replace("    return nn.Sequential", reads_values))
    pilot = run_pilot(open_subject(python_file), Settings(recipes=("folded",), steps=steps, device="cpu"))
    assert not any(found.failed for found in pilot.measured.values())
    assert pilot.elsewhere == 0 and len(pilot.plans["folded"].layers) == 2


def test_a_model_may_read_values_through_numpy(python_file):
    reads_values = "    batch[0].numpy()\n    return nn.functional"
    python_file.write_text(python_file.read_text().replace("    return nn.functional", reads_values))
    assert count_flops(open_subject(python_file)) is None


def test_a_model_without_a_loss_is_refused_before_it_trains(python_file):
    python_file.write_text(python_file.read_text().replace("def loss", "def other").replace("yield x, ", "yield x, #"))
    with pytest.raises(ConfigError, match=r"a function loss\(model, batch\)"):
        count_flops(open_subject(python_file))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"recipes": ("bf16",)}, "nothing in FP8"),
        ({"precisions": ("fp61",)}, "Did you mean"),
        ({"gpu": "h10"}, "--gpu"),
    ],
)
def test_wrong_settings_are_refused(python_file, wrong, match):
    with pytest.raises(ConfigError, match=match):
        run_pilot(open_subject(python_file), Settings(**wrong))
