"""Sessions of `octavo bench parity`: what one leaves undone, another does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo.errors import ConfigError, UnsupportedError
from octavo_bench import ladder, parity, results
from octavo_bench.installed_text import InstalledText
from octavo_bench.kind import Output
from octavo_bench.lanes import BF16, CONTROL
from octavo_bench.results import Row

Run = Callable[..., list[Row]]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    ids = torch.randint(9, (20_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int16)
    own = InstalledText(ids, {"python": ids[:400], "english": ids[400:700]}, "digest")
    monkeypatch.setattr(parity, "installed_text", lambda limit: own)
    monkeypatch.setattr(parity, "tuning_texts", lambda limit: (own, replace(own, heldout={"english": ids[:200]})))
    monkeypatch.setattr(parity, "COMMITTED", tmp_path / "none")
    for name in ("tiny", "moe-tiny"):
        monkeypatch.setitem(ladder.SIZES, name, replace(ladder.SIZES[name], tokens_per_parameter=0.1))

    def run(
        pairs: int, recipes: str = "folded", conditions: str = "half", sizes: str = "tiny", until_verdict: bool = False
    ) -> list[Row]:
        length = parity.Session(pairs=pairs, device="cpu", until_verdict=until_verdict)
        out = Output(write=tmp_path)
        assert parity.command(sizes=sizes, conditions=conditions, recipes=recipes, session=length, output=out) == 0
        return ladder.read_rows(tmp_path)

    return run


def test_fine_tunings_of_a_session_share_their_base(session: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    together = parity.run_together

    def noted(lanes: list[parity.Lane], seed: int, **options: object) -> bool:
        trained.extend((lane.arm, lane.training.tuned, seed) for lane in lanes)
        return together(lanes, seed, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(parity, "run_together", noted)
    rows = session(2, conditions="tuned,lora")
    assert trained[0] == (BF16, "", parity.FIRST_SEED) and [own for own in trained if not own[1]] == trained[:1]
    assert {row["condition"] for row in rows} == {"tuned", "lora"} and len(rows) == 2 * 2 * 3
    assert {(*row["by_language"],) for row in rows} == {("english",)}
    assert session(2, conditions="tuned,lora") == rows
    with pytest.raises(ConfigError, match="Give them a session"):
        session(1, conditions="half,lora")


def test_a_session_continues_the_share_of_bf16_that_another_kept(
    session: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = replace(ladder.SIZES["tiny"], together=False, branch=0.5)
    monkeypatch.setitem(ladder.SIZES, "tiny", large)
    expected = session(1)
    shares: list[int] = []
    sessions: list[parity.Session] = []
    together = parity.run_together
    kept = tmp_path / "kept"

    def cut(lanes: list[parity.Lane], seed: int, **options: object) -> bool:
        if "until" in options:
            shares.append(seed)
            return together(lanes, seed, **options)  # type: ignore[arg-type]
        return len(sessions) == 2 and together(lanes, seed, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(parity, "run_together", cut)
    for _ in range(2):
        sessions.append(parity.Session(pairs=1, device="cpu", keep=kept))
        out = Output(write=tmp_path / "large")
        parity.command(sizes="tiny", conditions="half", recipes="folded", session=sessions[-1], output=out)
        assert len([*kept.glob("tiny-100-*.safetensors")]) == 1 and not [*kept.glob("*.partial")]
    assert shares == [100]
    assert figures(ladder.read_rows(tmp_path / "large")) == figures(expected)


def figures(rows: list[Row]) -> list[Row]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_a_session_goes_on_where_the_last_one_stopped(session: Run, tmp_path: Path) -> None:
    first = session(2)
    assert [(row["seed"], row["recipe"]) for row in first] == [
        (s, a) for s in (100, 101) for a in (BF16, CONTROL, "folded")
    ]
    assert session(2) == first
    [file] = tmp_path.glob("*-ladder.json")
    cut = results.load(file)
    file.unlink()
    results.write(replace(cut, rows=cut.rows[:4]), tmp_path)  # the second block has BF16 alone
    resumed = session(2)
    assert figures(resumed) == figures(first) and resumed[:4] == first[:4]
    more = session(3)
    assert more[:6] == resumed and {row["seed"] for row in more[6:]} == {102}


def test_another_recipe_or_condition_joins_the_blocks(session: Run) -> None:
    first = session(1)
    changed = "folded+wgrad.precision=bf16"
    second = session(1, f"folded,{changed}")
    assert second[:3] == first and [row["recipe"] for row in second[3:]] == [changed]
    assert second[3]["training_loss"] != second[2]["training_loss"]
    both = session(1, conditions="half,whole,half+outliers")
    whole, hard = both[4:7], both[7:]
    assert {row["condition"] for row in whole} == {"whole"} and {row["condition"] for row in hard} == {"half+outliers"}
    assert whole[0]["fresh_loss"] == first[0]["fresh_loss"] != hard[0]["fresh_loss"]  # BF16 branched from itself
    assert whole[2]["training_loss"] != first[2]["training_loss"]


def test_a_condition_with_fewer_steps_joins_the_session(session: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ladder.SIZES, "tiny", replace(ladder.SIZES["tiny"], tokens_per_parameter=0.4))
    rows = session(1, conditions="half,half+short,half+batch4")
    assert [row["condition"] for row in rows] == [
        name for name in ("half", "half+short", "half+batch4") for _ in range(3)
    ]
    assert len({row["tokens"] for row in rows}) > 1


def test_no_arm_joins_a_branch_that_a_gpu_would_not_repeat(session: Run) -> None:
    """Of a run in BF16 repeated on a GPU the weights half-way differ, and pairs across both would be worth nothing."""
    rows = session(1, conditions="half,whole")
    arms, trained = [BF16, CONTROL, "folded", "block"], [("tiny", "half"), ("tiny", "whole")]
    study = parity.Study(trained, arms, parity.Session(device="cpu"), rows, print)
    assert [study._unmade(size, "digest") for size in study.sizes] == [(100, ["block"])] * 2
    study = parity.Study(trained, arms, parity.Session(device="cpu"), rows, print)
    study.device = torch.device("cuda")
    assert [study._unmade(size, "digest") for size in study.sizes] == [(101, arms), (100, ["block"])]


def test_bf16_alone_shows_the_spread(session: Run) -> None:
    rows = session(1, "none", "half,half+lr4")
    assert [row["recipe"] for row in rows] == [BF16, CONTROL] * 2
    assert [gap.arm for gap in ladder.gaps(rows[:2])] == [CONTROL]


def test_experts_are_paired_and_an_arm_that_is_not_what_it_says_is_left_out(
    session: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = session(1, "folded,rowwise,block", sizes="moe-tiny")
    assert [row["recipe"] for row in rows] == [BF16, CONTROL, "folded", "rowwise"]
    assert len({row["fresh_loss"] for row in rows}) == 4 and {row["model"] for row in rows} == {"moe-34k"}
    with pytest.raises(UnsupportedError, match=r"leaves layers\.0\.feed_forward\.experts\.gate_up_gemm in BF16"):
        session(1, "block", sizes="moe-tiny")
    assert "block: left out: " in (said := capsys.readouterr().out) and "in BF16: its fprop has an operand" in said


def test_what_is_kept_for_backward_is_an_arm(session: Run) -> None:
    rows = session(1, "folded,folded+policy.memory=low")
    assert len({row["fresh_loss"] for row in rows}) == 4


def test_arms_of_a_large_size_run_beside_each_other(session: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the GPUs in turn, from one snapshot, and each run is that of a single GPU."""
    arms = [BF16, CONTROL, "folded"]
    first, second = (torch.device("cpu", index) for index in range(2))
    monkeypatch.setitem(ladder.SIZES, "tiny", replace(ladder.SIZES["tiny"], together=False))
    alone = session(1)
    study = parity.Study([("tiny", "half")], arms, parity.Session(device="cpu", pairs=1), [], print)
    [size], study.devices = [*study.sizes], [first, second]
    study._place = {BF16: first, CONTROL: second, "folded": first}
    assert {(job.arm, job.device) for job in study._jobs()} == {(BF16, first), (BF16, second), ("folded", first)}
    [rows] = study.blocks()
    assert figures(rows) == figures(alone)
    lanes = [*study._made.values()]
    assert [[lane.arm for lane in wave] for wave in parity.waves(lanes)] == [[BF16, CONTROL], ["folded"]]
    study.found = [row | {"seconds": seconds} for row, seconds in zip(alone, (5.0, 3.0, 2.0), strict=True)]
    assert study._block_before(size) == 7.0


def test_a_settled_study_gives_its_time_to_the_others(session: Run, tmp_path: Path) -> None:
    first = session(1)
    losses = {BF16: 1.0, CONTROL: 1.0, "folded": 1.01}
    known = [
        row | {"seed": s, "fresh_loss": losses[row["recipe"]] + s * 1e-6} for s in range(101, 121) for row in first
    ]
    assert ladder.is_settled(known, [BF16, CONTROL, "folded"])
    assert not ladder.is_settled(known, [BF16, CONTROL, "folded", "block"]) and not ladder.is_settled([], ["folded"])
    [file] = tmp_path.glob("*-ladder.json")
    made = results.load(file)
    file.unlink()
    results.write(replace(made, rows=tuple(known)), tmp_path)
    more = session(1, conditions="half,whole", until_verdict=True)
    assert [row["condition"] for row in more[len(known) :]] == ["whole"] * 3


def test_sessions_on_one_gpu_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(parity, "gpu_of", lambda device: f"gpu-{device.index or 0}")
    order, cuda = [], torch.device("cuda")

    def other() -> None:
        with parity.turn(cuda):
            order.append("second")

    beside = threading.Thread(target=other)
    with parity.turn(cuda):
        with parity.turn(torch.device("cuda", 1)):  # another GPU
            order.append("elsewhere")
        beside.start()
        beside.join(0.1)
        assert beside.is_alive()
        order.append("first")
    beside.join(10)
    assert order == ["elsewhere", "first", "second"]


def test_recipes_that_cannot_be_paired_are_refused() -> None:
    parity.check_recipes(["folded", "tensorwise+dgrad.precision=bf16"])
    parity.check_recipes(["folded+policy.norm_inputs=fp8"])
    with pytest.raises(ConfigError, match="Did you mean 'memory'"):
        parity.check_recipes(["folded+policy.memroy=low"])
    with pytest.raises(ConfigError, match="'exact' or 'low'"):
        parity.check_recipes(["folded+policy.memory=less"])
    with pytest.raises(ConfigError, match="no FP8 GEMM"):
        parity.check_recipes(["bf16"])
    with pytest.raises(ConfigError, match="keeps scales between steps"):
        parity.check_recipes(["delayed"])
