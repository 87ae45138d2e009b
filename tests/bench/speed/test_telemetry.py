"""The cost of telemetry is measured on a CPU too, and its row is a result."""

import json

import pytest

from octavo.bench.results import Result
from octavo.bench.tables.speed import telemetry
from octavo.cli.main import main


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "telemetry", *arguments])
    return ended.value.code


def test_a_row_is_a_result(capsys):
    assert run("--workload", "tiny", "--device", "cpu", "--steps", "1", "--rounds", "1", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    result = Result(kind="telemetry", date="2026-01-01", hardware="cpu", versions={}, command="", rows=tuple(rows))
    assert "| tiny | 128 |" in telemetry(result)
    assert rows[0]["tensors"] >= 2 * 5 * 3
    assert rows[0]["ms_watched"] > 0


@pytest.mark.parametrize("arguments", [("--workload", "tinny"), ("--every", "0"), ("--workload", "tiny-model")])
def test_what_it_refuses(arguments, capsys):
    assert run("--device", "cpu", *arguments) == 2
    assert "Did you mean 'tiny'" in capsys.readouterr().err or arguments[1] != "tinny"
