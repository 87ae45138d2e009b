"""The block of a bug report tells what was found, and nothing that is private."""

from __future__ import annotations

import pytest

from octavo.lab.doctor.check import Check, failure, ok, run_check
from octavo.lab.doctor.examination import Examination, markdown, variables, without_paths

PRIVATE = {
    "HOME": "/home/alice",
    "OCTAVO_API_KEY": "abc123",
    "NCCL_AUTH_TOKEN": "abc123",
    "TORCH_HOME": "/home/alice/models",
    "NCCL_SOCKET_IFNAME": "eth0",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "TORCH_PROXY": "http://alice:abc123@proxy",
    "MY_PASSWORD": "abc123",
}


def examined() -> Examination:
    bad = failure(
        "FileNotFoundError: /home/alice/secret-project/data.txt | not there",
        rows=[{"place": "/home/alice/secret-project/train.py:76", "waits": 3, "share": 0.25}],
    )
    found = Examination({"machine": lambda: None})
    for name, finding in (("disk", ok("12 GiB free")), ("host syncs", bad)):
        found.results.append(("machine", run_check(Check(name, "", "Do.", lambda _, f=finding: f), None)))  # type: ignore[misc]
    return found


def test_nothing_private_is_told() -> None:
    text = markdown(examined(), PRIVATE)
    for secret in ("alice", "abc123", "secret-project", "/home", "HOME=", "PASSWORD", "API_KEY", "TOKEN"):
        assert secret not in text, secret
    for told in ("CUDA_VISIBLE_DEVICES=0,1", "NCCL_SOCKET_IFNAME=eth0", "TORCH_HOME is set", "torch: ", "octavo: "):
        assert told in text, told


def test_it_is_markdown_with_a_line_for_each_check() -> None:
    lines = markdown(examined(), {}).splitlines()
    assert lines[0] == "### octavo doctor"
    assert "| machine: disk | ok | 12 GiB free |" in lines
    assert "| machine: host syncs | FAILURE | FileNotFoundError: .../data.txt \\| not there |" in lines
    assert ".../train.py:76  3  0.25" in lines
    assert not any("environment" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/home/me/a.txt", ".../a.txt"),
        ("cannot open '/data/x/y.bin': no", "cannot open '.../y.bin': no"),
        ("~/runs/first", ".../first"),
        ("octavo/train/lane.py:76", ".../lane.py:76"),
        ("/dev/shm has 0.06 GiB", ".../shm has 0.06 GiB"),
        ("../mine/my texts/a.txt", ".../a.txt"),
        ("BF16/FP8 of 0.97", "BF16/FP8 of 0.97"),
        ("12 of 30 layers, 1x128 by 128x128", "12 of 30 layers, 1x128 by 128x128"),
    ],
)
def test_paths_are_cut(text: str, told: str) -> None:
    assert without_paths(text) == told


def test_only_plain_values_are_told() -> None:
    assert variables(
        {"OCTAVO_TRITON": "0", "NVIDIA_TF32_OVERRIDE": "0", "CUDA_HOME": "/usr/local/cuda", "USER": "me"}
    ) == [
        "CUDA_HOME is set",
        "NVIDIA_TF32_OVERRIDE=0",
        "OCTAVO_TRITON=0",
    ]
