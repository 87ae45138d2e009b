"""The study as a whole: rates from results, assumptions from a file, rows, tables and the command."""

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.lab.models.config import ModelConfig
from octavo_bench import results
from octavo_bench.assumptions import Assumptions, Links, load
from octavo_bench.layouts import GIB
from octavo_bench.scaling import CHECK, KIND, bench_scaling, kept_values, measured

TABLES = {"scaling": KIND.table, **KIND.tables}

SHAPE = {"dim": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "layers": 2, "batch": 2, "sequence": 32, "vocab": 0}
WEIGHTS = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
VALUES = 64 * 2 * (6 * 64 + 2 * 32 + 3 * 128)
"""Of 64 tokens in two layers."""


def committed(directory: Path) -> Path:
    def step(name: str) -> dict[str, object]:
        times = {"gemm_ms": 2.0, "attention_ms": 1.0, "elementwise_ms": 0.5}
        peak = (3 * VALUES + 4 * WEIGHTS) / GIB
        row = {"workload": "llama-8b-stack", "implementation": name, "ms": 4.0, "ratio_to_bf16": 1.0}
        return {**row, "peak_gib": peak, **times, "shape": SHAPE}

    def update(states: str, weight: str) -> dict[str, object]:
        row = {"states": states, "weight": weight, "bytes_per_parameter": 7.0, "ms": 1.0, "ratio_to_fused_adamw": 1.0}
        return {**row, "ms_clipped": 2.0, "parameters": 1000}

    optimizers = [update("fp32", "float32"), update("fp8", "bfloat16"), update("exact", "bfloat16")]
    for kind, rows in (("step", [step("bf16"), step("octavo folded")]), ("optimizer", optimizers)):
        keys = {"date": "2026-11-21", "hardware": "gpu", "versions": {}, "command": "x"}
        results.write(results.Result(kind=kind, rows=tuple(rows), **keys), directory)
    return directory


SMALL = {"gpus": (8, 16), "batch_tokens": 2**18}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[dict[str, object]]:
    directory = committed(tmp_path_factory.mktemp("results"))
    return [*bench_scaling(measured(Assumptions(**SMALL), directory))]


def test_rates_are_operations_and_bytes_by_what_was_measured(tmp_path):
    scheme = measured(Assumptions(), committed(tmp_path)).schemes["fp8"]
    tokens = 64
    assert scheme.gemm_tflops == pytest.approx(6 * tokens * WEIGHTS / 2e-3 / 1e12, rel=1e-4)
    assert scheme.attention_tflops == pytest.approx(6 * tokens * 2 * 64 * 32 / 1e-3 / 1e12, rel=1e-4)
    assert scheme.elementwise_ps == pytest.approx(0.5e9 / VALUES, rel=1e-4)
    assert scheme.optimizer_ps == pytest.approx(2e9 / 1000) and scheme.activation_bytes == pytest.approx(3, rel=1e-4)


def test_the_stack_that_rates_come_from_takes_the_time_it_took(tmp_path):
    """Rates times work gives the measured milliseconds back."""
    scheme = measured(Assumptions(), committed(tmp_path)).schemes["bf16"]
    products = 6 * 64 * WEIGHTS / (scheme.gemm_tflops * 1e12) + 6 * 64 * 2 * 64 * 32 / (scheme.attention_tflops * 1e12)
    assert products + VALUES * scheme.elementwise_ps * 1e-12 == pytest.approx(3.5e-3, rel=1e-4)


def test_a_rate_that_is_stated_is_not_looked_up_and_one_that_is_nowhere_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="'bf16' has no gemm_tflops"):
        measured(Assumptions(), tmp_path)
    stated = dict.fromkeys(
        ("gemm_tflops", "attention_tflops", "elementwise_ps", "optimizer_ps", "activation_bytes"), 1.0
    )
    schemes = {name: replace(scheme, **stated) for name, scheme in Assumptions().schemes.items()}
    assert measured(Assumptions(schemes=schemes), tmp_path).schemes == schemes


def test_values_of_a_gpt_have_no_gate():
    gpt = ModelConfig(architecture="gpt", vocab=8, dim=64, layers=1, heads=4, sequence=8)
    assert kept_values(gpt) == 8 * 64 + 2 * 256


def test_a_file_says_otherwise_key_by_key(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        "gpus = [128]\nnetwork_gbit_per_s = 100\n[schemes.fp8]\ngemm_tflops = 900\n"
        "[models.13B]\nvocab = 32000\ndim = 5120\nlayers = 40\nheads = 40\nsequence = 4096\n"
    )
    found, plain = load(file), Assumptions()
    assert found.gpus == (128,) and found.links.outside == 12.5e9 * 0.85
    assert found.schemes["fp8"] == replace(plain.schemes["fp8"], gemm_tflops=900.0)
    assert set(found.models) == {*plain.models, "13B"} and found.schemes["bf16"] == plain.schemes["bf16"]
    assert load() == plain


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu = [1]", "unknown key 'gpu'"),
        ("[schemes.fp8]\nwire = 1", "unknown key 'wire'"),
        ("overlap = 1.5", "a share is from 0 to 1"),
        ("batch_tokens = 0", "must be positive"),
    ],
)
def test_a_wrong_file_is_an_error(text, words, tmp_path):
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load(file)


def test_links_are_the_stated_ones():
    assert Assumptions().links == Links(450e9 * 0.7, 50e9 * 0.85, 2e-6, 6e-6)


def test_rows_cover_every_case_and_say_what_they_assume(rows):
    schemes = list(Assumptions().schemes)
    assert [(r["model"], r["gpus"]) for r in rows[::4]] == [
        CHECK[:2],
        *((m, g) for m in ("8B", "70B", "175B") for g in (8, 16)),
    ]
    assert [row["scheme"] for row in rows] == schemes * 7
    assert rows[0]["assumptions"]["gpus"] == [8, 16] and "assumptions" not in rows[1]
    results.Result(kind="scaling", date="2026-11-21", hardware="paper", versions={}, command="x", rows=tuple(rows))
    for row in rows:
        if "error" in row:
            assert row["error"] == "no layout fits"
            continue
        spent = row["compute_ms"] + row["bubble_ms"] + row["exposed_ms"]
        assert row["ms"] == pytest.approx(spent, rel=1e-3)
        assert row["peak_gib"] == pytest.approx(sum(row["memory_gib"].values()), rel=1e-3)
        assert row["wire_gb"] == pytest.approx(row["sent_gb"]["weights"] + row["sent_gb"]["gradients"], rel=1e-3)
        assert row["scheme"] != "bf16" or row["ratio_to_bf16"] == row["ratio_in_its_layout"] == 1
    assert any("error" in row for row in rows if row["model"] == "175B")


def test_the_search_may_do_better_than_bf16s_layout_and_never_worse(rows):
    for row in rows:
        if "ratio_to_bf16" in row and row["peak_gib"] <= 131:
            assert row["ratio_to_bf16"] >= row["ratio_in_its_layout"] * (1 - 1e-3) or row["scheme"] == "bf16"


@pytest.fixture
def directory(rows, tmp_path) -> Path:
    keys = {"date": "2026-11-21", "hardware": "paper", "versions": {}, "command": "octavo bench scaling"}
    results.write(results.Result(kind="scaling", rows=tuple(rows), **keys), tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", TABLES)
def test_tables_come_from_the_result_or_not_at_all(name, directory, tmp_path_factory):
    text = TABLES[name](directory)
    assert "2026-11-21-paper-scaling.json" in text and "Computed, not measured" in text
    assert TABLES[name](tmp_path_factory.mktemp("empty")) == ""


def test_bars_are_as_long_as_steps(directory, rows):
    text = TABLES["scaling-bars"](directory)
    first = next(row for row in rows if row["model"] == "70B" and "ms" in row)
    longest = max(row["ms"] * row["gpus"] for row in rows if row["model"] == "70B" and "ms" in row)
    line = next(part for part in text.split("70B:")[1].splitlines()[1:] if "█" in part)
    assert sum(map(line.count, "█░▒")) == pytest.approx(50 * first["ms"] * first["gpus"] / longest, abs=1)
    assert "no layout fits" in text


def test_wire_bytes_are_compared_with_bf16(directory, rows):
    last = rows[3]
    line = next(
        line for line in TABLES["scaling-wire"](directory).splitlines() if line.startswith("| fp8, fp8-block |")
    )
    assert f"{100 * (last['wire_gb'] / rows[0]['wire_gb'] - 1):+.0f} %" in line


def test_the_check_shows_what_was_measured(directory):
    assert "Not measured yet." in TABLES["scaling-check"](directory)
    row = {
        "workload": "llama-3-8b",
        "layout": "data",
        "ranks": 4,
        "implementation": "octavo folded, bf16 gradients, fp8 states",
        "ratio_to_bf16": 1.3,
    }
    row |= {"tokens_per_s_per_gpu": 12345.0, "peak_gib": 40.0, "wire_bytes": 1}
    cut = row | {"layout": "tensor 2", "tokens_per_s_per_gpu": 54321.0}
    keys = {"date": "2026-11-21", "hardware": "gpu", "versions": {}, "command": "x"}
    results.write(results.Result(kind="distributed", rows=(row, cut), **keys), directory)
    text = TABLES["scaling-check"](directory)
    assert "12,345 |" in text and "| 1.30 |" in text and text.count("Measured on gpu.") == 1 and "54,321" not in text


def test_the_check_shows_one_machine(directory):
    """The one with the most schemes, even if another is newer."""
    names = ("bf16", "octavo folded, bf16 gradients, fp8 states")
    for day, hardware, speed, count in ((21, "old", 111.0, 2), (22, "new", 222.0, 1)):
        row = {"workload": "llama-3-8b", "layout": "data", "ranks": 4, "ratio_to_bf16": 1.0, "peak_gib": 40.0}
        row |= {"tokens_per_s_per_gpu": speed, "wire_bytes": 1}
        rows = tuple(row | {"implementation": name} for name in names[:count])
        keys = {"date": f"2026-11-{day}", "hardware": hardware, "versions": {}, "command": "x"}
        results.write(results.Result(kind="distributed", rows=rows, **keys), directory)
    text = TABLES["scaling-check"](directory)
    assert text.count("| 111 |") == 2 and "222" not in text and "Measured on old." in text


def test_assumptions_are_all_there(directory):
    text = TABLES["scaling-assumptions"](directory)
    for name in (*Assumptions.__dataclass_fields__, *Assumptions().schemes["fp8"].__dataclass_fields__):
        assert name in ("models", "schemes") or f"| `{name}` |" in text
    assert "| 175B | gpt | 96 |" in text


def test_the_command_prints_and_writes(tmp_path, capsys):
    from octavo.lab.cli.main import main

    committed(tmp_path / "in")
    (tmp_path / "few.toml").write_text("gpus = [8]\nbatch_tokens = 65536")
    with pytest.raises(SystemExit) as code:
        main(["bench", "scaling", f"{tmp_path}/few.toml", "--results", f"{tmp_path}/in", "--write", f"{tmp_path}/out"])
    assert code.value.code == 0 and "times BF16's speed" in capsys.readouterr().out
    written = results.latest("scaling", tmp_path / "out")
    assert written is not None and (written.hardware, written.command) == ("paper", "octavo bench scaling few.toml")
