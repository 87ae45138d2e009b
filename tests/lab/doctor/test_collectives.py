"""Collectives: wrong results and hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from octavo.lab.doctor import collectives
from octavo.lab.doctor.check import run_check
from octavo.lab.doctor.hardware import Gpu
from octavo.lab.doctor.rank import SENT, cases, wrong
from octavo.lab.doctor.subjects import Machine

HANG = "import time; time.sleep(60)"


def test_processes_on_a_cpu_exchange_everything_correctly() -> None:
    found = collectives.connect(2, "gloo")
    assert found.errors == [] and found.gb_per_s > 0


def test_bytes_that_arrive_wrongly_are_found_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank alone, whose collectives copy what they must give, and spoil bytes."""
    made = list(cases(0, 3, torch.device("cpu")))
    assert {case.result.dtype for case in made} == set(SENT)

    def carried_out(case: Any) -> Any:
        def call(result: torch.Tensor, own: torch.Tensor) -> None:
            result.copy_(case.want)
            if result.dtype == torch.uint8:
                result[5] += 1

        return case._replace(call=call)

    told = wrong(0, map(carried_out, made))
    assert [line.partition(":")[0] for line in told] == [
        f"{n} of uint8" for n in ("all_gather", "all_to_all", "broadcast")
    ]
    found = collectives.collectives.look((3, collectives.Answers(told), None))
    assert found.verdict == "failure" and "all_gather of uint8" in found.seen, found


@pytest.mark.parametrize(
    ("measured", "nominal", "verdict", "seen"),
    [
        (350.0, 450.0, "ok", "350.0 GB/s of 450 nominal"),
        (60.0, 450.0, "warning", "60.0 GB/s of 450 nominal"),
        (60.0, None, "ok", "60.0 GB/s"),
    ],
)
def test_a_slow_link_is_a_warning(measured: float, nominal: float | None, verdict: str, seen: str) -> None:
    found = collectives.collectives.look((8, collectives.Answers([], measured), nominal))
    assert found.verdict == verdict and seen in found.seen, found
    assert ("topo" in found.remedy) == (verdict == "warning")


@pytest.mark.parametrize(
    ("up", "version", "major", "pcie", "gb_per_s"),
    [
        (4, 1, 6, (16, 3), 80.0),
        (6, 2, 7, (16, 3), 150.0),
        (12, 5, 8, (16, 4), 300.0),  # an A100: version 3.1
        (18, 6, 9, (16, 5), 450.0),
        (18, 7, 9, (16, 5), 450.0),
        (18, 7, 10, (16, 5), 900.0),
        (0, None, 9, (16, 4), 31.52),
        (0, None, 9, (None, None), None),
    ],
)
def test_nominal_bandwidth_is_that_of_the_links_that_are_up(
    monkeypatch: pytest.MonkeyPatch,
    up: int,
    version: int | None,
    major: int,
    pcie: tuple[int | None, int | None],
    gb_per_s: float,
) -> None:
    """Versions are numbered as in NVML's enumeration: 1.0, 2.0, 2.2, 3.0, 3.1, 4.0 and 5.0 are 1 to 7."""
    answers: dict[str, object] = {"nvmlDeviceGetCudaComputeCapability": (major, 0)}
    answers |= {"nvmlDeviceGetMaxPcieLinkWidth": pcie[0], "nvmlDeviceGetMaxPcieLinkGeneration": pcie[1]}

    def ask(name: str, link: int = -1) -> object:
        return {"nvmlDeviceGetNvLinkState": int(link < up), "nvmlDeviceGetNvLinkVersion": version, **answers}[name]

    gpu = Gpu(None)
    monkeypatch.setattr(gpu, "_ask", ask)
    assert gpu.link_gb_per_s() == pytest.approx(gb_per_s)


@pytest.mark.parametrize(
    ("program", "timeout", "seen"),
    [
        (HANG, 2.0, "no answer from rank 0, 1"),
        (f"import sys; sys.argv[1] == '1' and sys.exit('no NCCL'); {HANG}", 60.0, "rank 1: no NCCL"),
    ],
)
def test_ranks_that_hang_or_die_are_named_and_ended(
    program: str, timeout: float, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(collectives.subprocess, "Popen", popen)
    (told,) = collectives.connect(2, "gloo", timeout, ("-c", program)).errors
    assert told.startswith(seen)
    assert len(started) == 2 and all(process.returncode is not None for process in started)


def test_what_the_working_directory_has_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a console script does not: of another person's folder it would be executed."""
    (tmp_path / "json.py").write_text("import sys; sys.exit('executed')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(collectives.sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    (told,) = collectives.connect(1, "gloo", 60.0, ("-c", "import json, sys; sys.exit('fine')")).errors
    assert told == "rank 0: fine"


def test_what_is_expected_is_what_the_collective_means() -> None:
    """Against a definition: the sum of what all put in, and what each sends to each."""
    ranks = [{case.name: case for case in cases(rank, 3, torch.device("cpu"))} for rank in range(3)]
    own = torch.stack([each["all_reduce of float32"].own for each in ranks])
    parts = own.view(3, 3, -1)  # by sender and receiver
    for rank, each in enumerate(ranks):
        assert torch.equal(each["all_reduce of float32"].want, own.sum(0))
        assert torch.equal(each["reduce_scatter of float32"].want, parts[:, rank].sum(0))
        assert torch.equal(each["all_to_all of float32"].want, parts[:, rank].flatten())
        assert torch.equal(each["all_gather of float32"].want, own.flatten())
        assert torch.equal(each["broadcast of float32"].want, own[0])


def test_one_device_has_nobody_to_send_to() -> None:
    finding = run_check(collectives.collectives, Machine(torch.device("cpu"))).finding
    assert finding.verdict == "skipped", finding


@pytest.mark.gpu
def test_the_gpus_of_this_machine() -> None:
    found = run_check(collectives.collectives, Machine(torch.device("cuda", 0))).finding
    if torch.cuda.device_count() > 1:  # a gather beside other tests may be slow, and a warning says so
        assert found.verdict in ("ok", "warning") and "a gather runs at" in found.seen, found
    else:
        assert found.verdict == "skipped", found
    assert not dist.is_initialized()
