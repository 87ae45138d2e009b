"""Flags of a configuration, and where settings come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from cyclopts import App

from octavo.errors import ConfigError
from octavo.lab.cli.flags import configure, field_docs, with_flags_of
from octavo.lab.cli.main import app


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    size_of: int = 1
    """How big."""
    on: bool = True
    """Whether it is on."""
    shared: str = "a"
    pair: tuple[float, float] = (1.0, 2.0)
    """Two of them,
    in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Right:
    shared: str | None = None
    """Text."""
    kind: Literal["x", "y"] = "x"


@dataclass(frozen=True, kw_only=True, slots=True)
class Both:
    left: Left = field(default_factory=Left)
    """On the left."""
    right: Right = field(default_factory=Right)
    """On the right."""


@with_flags_of(Both)
def command(name: str = "n", *, settings: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Do it."""
    return name, settings


def parsed(*arguments: str) -> Any:
    alone = App(result_action="return_value")
    alone.default(command)
    return alone(arguments, exit_on_error=False, print_error=False)


def test_a_run_is_named_by_its_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"run": {"steps": 7, "out": "runs/moved"}}')
    config = configure(tmp_path, "tiny", {})
    assert (config.run.steps, config.run.out) == (7, tmp_path)
    assert configure(tmp_path, "tiny", {"run": {"out": "elsewhere"}}).run.out == Path("elsewhere")
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        configure(tmp_path, "tiny", {})


def test_only_what_was_given_is_set() -> None:
    assert parsed() == ("n", {})
    assert parsed("m", "--size-of", "3") == ("m", {"left": {"size_of": 3}})


def test_long_and_short_names() -> None:
    assert parsed("--left.size-of", "3") == parsed("--size-of", "3")
    assert parsed("--left.shared", "l", "--right.shared", "r")[1] == {
        "left": {"shared": "l"},
        "right": {"shared": "r"},
    }


def test_further_names_lead_to_the_same_field(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--lr", "--learning-rate"):
        app(["train", "--preset", "tiny", flag, "3e-5", "--dry-run"], result_action="return_value")
        assert '"lr": 3e-05' in capsys.readouterr().out


def test_types() -> None:
    settings = parsed("--no-on", "--pair", "3", "4.5", "--kind", "y")[1]
    assert settings == {"left": {"on": False, "pair": (3.0, 4.5)}, "right": {"kind": "y"}}


def test_words_of_the_fields() -> None:
    assert field_docs(Left) == {
        "size_of": "How big.",
        "on": "Whether it is on.",
        "pair": "Two of them,\nin order.",
    }
    assert field_docs(Both) == {"left": "On the left.", "right": "On the right."}


def test_preset_under_file_under_flags(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[run]\nsteps = 7\nbatch = 2\n", encoding="utf-8")
    config = configure(file, "tiny", {"run": {"steps": 9}})
    assert (config.run.steps, config.run.batch, config.run.log_every) == (9, 2, 5)
    assert config.run.out == Path("runs/mine")


def test_the_demo_follows_the_device_asked_for() -> None:
    assert configure(None, "demo", {"run": {"device": "cpu"}}) == configure(
        None, "demo-cpu", {"run": {"device": "cpu"}}
    )
    assert configure(None, "demo", {"run": {"device": "cuda:1"}}).model.dim == 2048


def test_neither_file_nor_preset() -> None:
    with pytest.raises(ConfigError, match=r"--preset \(demo, .*tiny"):
        configure(None, None, {})


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("train --preset tiny --dry-run --run.steps 7.9", "--run.steps: 7.9"),
        ("train --preset tiny --dry-run --eval-tokens 0.5", "--eval-tokens: 0.5"),
        ("train --preset tiny --dry-run --run.bf16-blocks 1 1.5", "--run.bf16-blocks: 1.5"),
        ("calibrate runs --batches=1.5", "--batches: 1.5"),
        ("localize runs --tokens -1.5e0", "--tokens: -1.5e0"),
    ],
)
def test_a_fraction_is_no_whole_number(command: str, flag: str) -> None:
    with pytest.raises(ConfigError) as error:
        app(command, exit_on_error=False, print_error=False)
    assert str(error.value) == f"{flag} is not a whole number."


def test_a_whole_number_may_be_written_as_a_float(capsys: pytest.CaptureFixture[str]) -> None:
    app("train --preset tiny --dry-run --run.steps 7.0 --lr 0.5", result_action="return_value")
    assert '"steps": 7,' in (said := capsys.readouterr().out) and '"lr": 0.5,' in said
