"""The measurement of clients' loops: what it times, and a row of the loop without a library."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import octavo
from octavo_bench import clients
from octavo_bench.results import Result


def test_time_is_that_of_the_steps_after_the_warm_up(monkeypatch):
    now = iter([10.0, 12.0])
    monkeypatch.setattr(clients.time, "perf_counter", lambda: next(now))
    clock = clients.Clock(clients.WARM_UP + 8)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    with clients.timed(clock):
        for _ in range(clock.last):
            optimizer.step()
    optimizer.step()
    assert clock.steps == clients.WARM_UP + 8 and clock.ms == 2000 / 8


class Wrapper(torch.optim.Optimizer):
    """An optimizer that steps two others, each of half of the parameters."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.inner = [torch.optim.AdamW([parameter]) for parameter in parameters]

    def step(self, closure=None):
        for optimizer in self.inner:
            optimizer.step()


@pytest.mark.parametrize("kind", [Wrapper, torch.optim.AdamW, torch.optim.SGD])
def test_a_step_of_several_optimizers_is_one(kind):
    clock, optimizer = clients.Clock(5), kind([nn.Parameter(torch.zeros(1)) for _ in range(2)])
    with clients.timed(clock):
        for _ in range(5):
            optimizer.step()
    optimizer.step()
    assert clock.steps == 5


def test_a_row_of_a_loop_without_a_library():
    pytest.importorskip("transformers", reason="needs transformers")
    size = clients.Size(dim=128, layers=1, length=8, batch=1, lr=3e-3)
    [row] = clients.bench_clients(["script"], device="cpu", size=size, steps=6)
    named = torch.__version__
    assert row["version"] in (named, named.partition("+")[0])  # a wheel of PyPI is named without its build
    assert row["fp8_layers"] == 7 and row["resumes"] and abs(row["gap_percent"]) < 1
    assert row["graphs"] == row["bf16_graphs"] == 1 and row["graph_breaks"] == 0
    Result(kind="clients", date="2026-11-23", hardware="cpu", versions={}, command="", rows=(row,))


def test_layers_of_every_kind_are_counted():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    mixture = transformers.MixtralConfig(num_key_value_heads=2, vocab_size=64, num_local_experts=4, **sizes)
    parts = (
        transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)),
        transformers.MixtralForCausalLM(mixture), nn.Conv2d(32, 32, 3), nn.Linear(32, 32), nn.Linear(32, 8),
    )  # fmt: skip
    model = nn.ModuleList(parts)
    plan = octavo.convert(model, "folded", policy=octavo.Policy(keep_defaults=False))
    assert clients.fp8_layers(model) == plan.fp8_layers > 4 + 4 + 2
    octavo.revert(model)
    assert clients.fp8_layers(model) == 0


def test_a_resumed_run_that_is_another_is_seen():
    pytest.importorskip("transformers", reason="needs transformers")

    def forgets(job):
        return clients.script(clients.replace(job, resumes=False))

    size = clients.Size(dim=128, layers=1, length=8, batch=1, lr=3e-3)
    client = clients.Client(library="torch", loop=forgets, lines=1)
    with torch.compiler.set_stance("force_eager"):  # bits of weights alone are compared
        assert not clients.measure(client, size, "cpu", 4)["resumes"], "it trained from the start again"


def test_a_client_that_is_not_there_is_left_out_unless_it_is_asked_for(monkeypatch):
    missing = clients.Client(library="no-such-library", loop=clients.script, lines=1)
    monkeypatch.setattr(clients, "CLIENTS", {"other": missing})
    size = clients.SIZES["cpu"]
    assert [*clients.bench_clients(device="cpu", size=size, steps=4)] == []


SECTIONS = {
    "script": "A script of your own",
    "Trainer": "Hugging Face: transformers' Trainer and TRL",
    "Lightning": "Lightning and Fabric",
    "Fabric": "Lightning and Fabric",
    "Accelerate": "Accelerate",
    "ZeRO-3": "DeepSpeed",
    "LoRA": "PEFT: LoRA over a base in FP8",
    "torchtitan": "torchtitan",
}


@pytest.mark.parametrize("client", SECTIONS)
def test_lines_are_those_that_the_documentation_adds(client):
    page = Path(__file__).parents[2] / "docs" / "how-to" / "use-with-your-trainer.md"
    section = page.read_text(encoding="utf-8").split(f"## {SECTIONS[client]}\n")[1].split("\n## ")[0]
    diffs = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
    added = [[line for line in diff.splitlines() if re.match(r"\+\s*\S", line)] for diff in diffs]
    wanted = next(lines for lines in added if client != "Fabric" or "Fabric" in lines[0])
    assert clients.CLIENTS[client].lines == len(wanted), wanted
