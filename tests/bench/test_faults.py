"""The bench of faults: what strikes, what is counted, and what the table says."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from octavo.lab.guard import GuardEvent
from octavo.lab.train.parallel import ranks_of
from octavo.lab.train.setup import set_up
from octavo_bench import faults as bench_module
from octavo_bench.fault_cases import CLASSES, FAULTS
from octavo_bench.faults import CONFIGURATIONS, KIND, STRIKE, Bench, Struck, _run, in_words
from octavo_bench.results import Result, merge


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text enough for the batches of a bench."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(60):
        lines = [f"line {j} of document {i} holds {i * j % 97} apples and {(i + j) ** 2 % 89} pears" for j in range(60)]
        (folder / f"{i}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def test_faults_are_of_all_classes_and_paces() -> None:
    assert len(FAULTS) >= 40 and len(CONFIGURATIONS) == 10
    assert set(Counter(fault.kind for fault in FAULTS.values())) == set(CLASSES)
    for kind in CLASSES:
        assert len({fault.pace for fault in FAULTS.values() if fault.kind == kind}) >= 2


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("inf in a token", "SwiGLU spike")),
        "layer's gradient x 1000",
    ],
)
def test_faults_of_layers_are_attributed(tmp_path: Path, corpus: Path, name: str) -> None:
    bench = Bench(out=tmp_path, trained=0, source=str(corpus), cache=str(tmp_path / "cache"))
    fault = FAULTS[name]
    loss, notes, ended = _run(
        bench.config("run", steps=STRIKE + 5, run={"recipe": fault.recipe, "eval_tokens": 512}), None, fault
    )
    told = next(note for note in notes if note.cause)
    assert (told.cause, told.layer, ended) == (fault.cause, fault.layer, "")
    assert told.step - STRIKE <= 5 and loss < 10


def test_the_model_is_trained_once_per_text(tmp_path: Path, corpus: Path) -> None:
    text = Path(shutil.copytree(corpus, tmp_path / "text"))
    bench = Bench(out=tmp_path, trained=3, source=str(text), cache=str(tmp_path / "cache"))
    path = bench.checkpoint()
    written = (path / "state.json").stat().st_mtime_ns
    assert path.name == "step-000003" and bench.checkpoint() == path
    assert (path / "state.json").stat().st_mtime_ns == written
    loss, _, ended = _run(bench.config("run", steps=1, mode="watch", run={"recipe": "delayed"}), path)
    assert 0 < loss < 10 and not ended
    for batch, kept in ((8, 3), (4, 0)):  # the noise of another batch size is no history
        config = bench.config("run", steps=1, run={"batch": batch})
        with ranks_of(config) as ranks:
            run = Struck(set_up(config, ranks), [])
            run.go_on_from(path)
            assert len(run.guard.state_dict()["watch"]["losses"]) == kept
    (text / "60.txt").write_text("more text", encoding="utf-8")
    assert bench.checkpoint() != path


def test_events_of_the_text_are_no_alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = [
        GuardEvent(0, "warning", "leak", "held-out text in the training text"),
        GuardEvent(7, "info", "shadow", "as it should be"),
        GuardEvent(9, "warning", "loss spike", "a spike"),
    ]
    monkeypatch.setattr(bench_module, "_run", lambda *_, **__: (1.0, notes, ""))
    row = bench_module._clean_row(Bench(out=tmp_path), tmp_path, 10, "folded")
    assert (row["alarms"], row["text"]) == (1, "a spike")


def test_a_fault_that_is_struck_again_replaces_its_row_alone() -> None:
    def result(*names: tuple[str, str], step: int) -> Result:
        fixed = {"struck_step": step, "layer": "", "cause": "", "recovered": True}
        rows = tuple({"fault": fault, "configuration": clean, **fixed} for fault, clean in names)
        return Result(kind="faults", date="2026-11-23", hardware="amd-epyc", versions={}, command="x", rows=rows)

    whole = result(("a", ""), ("b", ""), ("", "folded"), step=1)
    merged = merge(whole, result(("b", ""), step=2)).rows
    assert [(row["fault"], row["configuration"], row["struck_step"]) for row in merged] == [
        ("a", "", 1), ("", "folded", 1), ("b", "", 2),
    ]  # fmt: skip


def test_the_table_says_what_was_not_seen() -> None:
    row = {
        "fault": "row", "class": "weights", "pace": "sudden", "struck_step": 33, "expected": "transient a", "cause": "",
        "layer": "", "recovered": True, "costs": True, "is_noted": False, "is_attributed": False,
        "watched_change": 2.0, "final_loss_change": 0.5, "ended_watching": "", "ended_acting": "",
    }  # fmt: skip
    seen = {**row, "fault": "bit", "detected_step": 35, "rule": "update", "cause": "transient", "layer": "a"}
    clean = {**row, "fault": "", "class": "", "configuration": "folded", "steps": 1000, "alarms": 1}
    rows = ({**seen, "is_noted": True, "is_attributed": True}, row, clean)
    table = KIND.markdown(rows).splitlines()
    assert table[2] == "| weights | bit | sudden | +2.00 % | +0.50 % | 2 steps | update | transient | a | yes |"
    assert "not noted" in table[3] and len(table) == 4
    text = in_words(rows)
    assert "Of 2 faults 2 cost" in text and "1 of these were noted" in text and "Not seen: row." in text
    assert "the layer in 1 of the 1" in text and "1 alarms in 1,000 steps over 1 configurations" in text
