"""The bench of reductions: its rows are results, their errors are those that theory says, and mistakes are named."""

import json

import pytest

from octavo.lab.cli.main import main
from octavo_bench.reduce import KIND, Work, bench_reduce


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "reduce", *arguments])
    return ended.value.code


def test_two_ranks(capsys):
    names = ("fp32", "fp8-block", "fp8-lm", "two-level")
    flags = [part for name in names for part in ("--scheme", name)]
    assert run(*flags, "--ranks", "2", "--elements", "4e4", "--repeats", "1", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(names) * 2 * 2 and not [row for row in rows if "error" in row]
    found = {(row["scheme"], row["collective"]): row for row in rows if row["gradient"] == "correlated"}
    assert found["fp32", "all-reduce"]["snr_db"] > 140
    scattered = [found[name, "reduce-scatter"]["snr_db"] for name in ("fp8-block", "fp8-lm")]
    assert scattered[0] > scattered[1] + 3 and scattered[1] > 25
    assert found["fp8-block", "reduce-scatter"]["wire_bytes"] / 40_000 == pytest.approx(0.5, rel=0.02)
    text = KIND.markdown(rows)
    assert text.count("\n") == 1 + len(names) * 2 and "of them across hosts" in text


def test_a_scheme_that_failed_has_a_line():
    row = {"scheme": "fp8-lm", "ranks": 2, "gradient": "correlated", "collective": "all-reduce", "error": "RunError: x"}
    assert "failed" in KIND.markdown([row])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--scheme", "fp8-blok"], "Did you mean 'fp8-block'"),
        (["--ranks", "1"], "one rank has nothing to reduce"),
        (["--dtype", "float8"], "float32 or bfloat16"),
    ],
)
def test_mistakes_are_named(flags, words, capsys):
    assert run(*flags) == 2 and words in capsys.readouterr().err


def test_ranks_are_those_of_torchrun(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert run("--ranks", "2") == 2 and "leave out --ranks" in capsys.readouterr().err


def test_under_torchrun_rank_0_has_the_rows(monkeypatch, tmp_path):
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(key, value)
    rows = [*bench_reduce(Work(("bf16",), 1000, "bfloat16", 1))]
    assert [row["ranks"] for row in rows] == [1] * 4 and rows[0]["wire_bytes"] == 0
