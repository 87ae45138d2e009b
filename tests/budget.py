"""How far a run of the suite is from the time that it should take, and the files that take most of it."""

from __future__ import annotations

import time
from collections import Counter

import pytest

SHOWN = 5


class Budget:
    """A plugin that sums the seconds of each file and says at the end how far the run was from `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.files: Counter[str] = Counter()
        self._began = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the set-up, the call or the end of a test, in whichever process it ran."""
        self.files[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print it, also if tests failed."""
        terminalreporter.write_line(self.told(time.monotonic() - self._began))

    def told(self, took: float) -> str:
        """Return the line for a run of that many seconds."""
        apart = f"{minutes(abs(took - self.seconds))} {'over' if took > self.seconds else 'under'}"
        most = ", ".join(f"{file} {seconds:.0f}" for file, seconds in self.files.most_common(SHOWN))
        return f"{minutes(took)}, {apart} the {minutes(self.seconds)} on two idle cores; seconds by file: {most}"


def minutes(seconds: float) -> str:
    """Return 432.4 as 7:12."""
    return "{}:{:02d}".format(*divmod(round(seconds), 60))
