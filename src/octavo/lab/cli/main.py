"""`octavo`: the commands and their error handling.

Exit codes: 0 done, 1 an error or a failed check, 2 a wrong flag or configuration, 3 a run that diverged, 130
interrupted, 143 terminated.
OCTAVO_DEBUG=1 in the environment shows tracebacks.
"""

from __future__ import annotations

import io
import os
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, get_args

from cyclopts import (
    App,
    ArgumentCollection,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from octavo import __version__
from octavo._util.terminal import printable, say
from octavo.errors import ConfigError, OctavoError, did_you_mean
from octavo.lab.cli.bench import add_bench
from octavo.lab.cli.lazy import add_commands

if TYPE_CHECKING:
    from cyclopts.help import DefaultFormatter, HelpPanel
    from rich.console import Console, ConsoleOptions

HELP = """Train models in FP8.

Start with:

    octavo doctor                  check this machine
    octavo pilot config.json       try FP8 on a Hugging Face model
    octavo train --preset demo     train a Llama in FP8 and its BF16 baseline

`octavo COMMAND --help` explains a command, `--help-all` with every setting.
Set OCTAVO_DEBUG=1 to see tracebacks.
"""

COMMANDS = {
    "plan": "plan:plan",
    "train": "train:train",
    "eval": "eval:eval_",
    "export": "runs:export",
    "dashboard": "runs:dashboard",
    "report": "runs:report",
    "dump": "runs:dump",
    "recipes": "plan:recipes",
    "calibrate": "calibrate:calibrate",
    "localize": "localize:localize",
    "pilot": "pilot:pilot",
    "doctor": "doctor:doctor",
}
"""`module:function` of each command, by name."""


def _default(value: object) -> str | None:
    """Return a default as the help shows it. Empty ones, and switches that are off, are not shown."""
    return str(value) if value not in (None, False, "", ()) else None


def _check_whole(_: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse fractions for whole numbers, which cyclopts rounds without a word."""
    for argument in arguments:
        kinds = {argument.hint, *get_args(argument.hint)}
        for token in argument.tokens if int in kinds and float not in kinds else ():
            if _is_fraction(token.value):
                raise ConfigError(f"{token.keyword or argument.name}: {token.value} is not a whole number.")


def _is_fraction(text: str) -> bool:
    with suppress(ValueError):  # no number at all: cyclopts says so
        return "." in text and not float(text).is_integer()
    return False


class _HelpFormatter:
    """Prints help as cyclopts does, but lets the terminal, not the source, break the paragraphs of parameters."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        from rich.text import Text

        for entry in panel.entries:
            text = getattr(entry.description, "primary_renderable", None)
            if isinstance(text, Text):
                text.plain = re.sub(r"(?<=\S)\n(?=\S)", " ", text.plain)
        self._plain()(console, options, panel)

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        self._plain().render_usage(console, options, usage)

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        self._plain().render_description(console, options, description)

    @staticmethod
    def _plain() -> DefaultFormatter:
        from cyclopts.help import DefaultFormatter

        return DefaultFormatter()


app = App(
    name="octavo",
    help=HELP,
    help_format="plaintext",
    help_formatter=_HelpFormatter(),
    version=__version__,
    default_parameter=Parameter(show_default=_default),
    config=_check_whole,
    suppress_keyboard_interrupt=False,
)
add_commands(app, "octavo.lab.cli", COMMANDS)
add_bench(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    # OpenMP's threads spin while waiting. A long spin makes a run beside other programs 5 times slower; no spin makes a
    # run with the cores to itself a third slower. A short spin costs little in both cases.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    if "--help-all" in given:
        from octavo.lab.cli import calibrate, plan, train

        for command in (train.train, plan.plan, calibrate.calibrate):
            command.show_all()  # type: ignore[attr-defined]
        given = ["--help" if word == "--help-all" else word for word in given]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 shows escapes
    plain, warnings.formatwarning = warnings.formatwarning, _one_line
    try:
        code = app(given, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        _fail(error, _usage(error), 2)
    except OctavoError as error:
        _fail(error, str(error), error.exit_code)
    except KeyboardInterrupt as error:
        _fail(error, "interrupted.", getattr(error, "exit_code", 130))
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has exited.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _fail(error, f"{error.filename or 'a file'}: cannot be used ({error.strerror or error}).", 1)
    except Exception as error:
        _fail(error, f"{type(error).__name__}: {error} (unexpected; OCTAVO_DEBUG=1 shows where)", 1)
    finally:
        warnings.formatwarning = plain
    sys.exit(code if isinstance(code, int) else 0)


def _usage(error: CycloptsError) -> str:
    """Return what is wrong with a command line, and what to do."""
    command = " ".join(("octavo", *(error.command_chain or ())))
    match error:
        case MissingArgumentError(argument=argument, keyword=None) if argument is not None and not error.tokens_so_far:
            return f"{argument.name} is missing. `{command} --help` explains it."
        case UnusedCliTokensError(unused_tokens=[*extra]):
            return f"{command}: unexpected argument{'s' * (len(extra) > 1)}: {', '.join(map(repr, extra))}."
        case UnknownCommandError(unused_tokens=[name, *_], command_chain=None | () | []):
            known = (*COMMANDS, "bench")
            return f"there is no command '{name}'.{did_you_mean(name, known)} Commands: {', '.join(known)}."
        case UnknownOptionError(token=token, argument_collection=arguments):
            option = (token.keyword or token.value).partition("=")[0]
            names = [name for argument in arguments if argument.parse for name in argument.names]
            return f"{command}: unknown option {option}.{_instead(option, names)}"
    return str(error)


def _instead(option: str, names: Sequence[str]) -> str:
    """Return which options were meant: those of any section with this name, or the one that is spelt most alike."""
    of_sections = [f"'{name}'" for name in names if name.rpartition(".")[2] == option.lstrip("-")]
    return f" Did you mean {' or '.join(of_sections)}?" if of_sections else did_you_mean(option, names, cutoff=0.8)


def _one_line(message: Warning | str, *_: object, **__: object) -> str:
    """Format a warning like an error, without a line of source code."""
    return f"octavo: warning: {' '.join(printable(message).split())}\n"


def _fail(error: BaseException, message: str, code: int) -> None:
    """Print the message on one line and exit."""
    if os.environ.get("OCTAVO_DEBUG") == "1":
        raise error
    say(f"octavo: error: {' '.join(printable(message).split())}", to_stderr=True)
    sys.exit(code)
