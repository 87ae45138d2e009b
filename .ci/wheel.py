"""Build the wheel and use it as a stranger does: in bare virtual environments, outside the clone.

`make wheel` runs it. With the Python of this script it installs the wheel with all that it needs, trains ten steps, and
follows the README line by line. Other Pythons that are found byte-compile the wheel and show its help, which needs
little; OCTAVO_WHEEL_PYTHONS=all trains ten steps with each, which downloads gigabytes. PyTorch is the version that
`constraints.txt` names; with all Pythons the others take the newest, and this one the oldest allowed too.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
FIRST_LOSS = 90
"""Seconds from the installation to the first FP8 loss."""
HELP = 0.3
"""Seconds of CPU of `octavo --help` in the fastest of `CALLS`."""
CALLS = 30
"""A busy machine is slower for seconds at a time."""
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""An excerpt of what a Python block prints: whole lines, in order."""


class Environment:
    """A virtual environment in a folder of its own, and the commands run there, outside the clone."""

    def __init__(self, python: str, home: Path) -> None:
        home.mkdir()
        self.home = home
        self.bin = home / "env" / "bin"
        self.run(python, "-m", "venv", home / "env")

    def command(self, *words: str | Path) -> tuple[list[str], dict[str, str]]:
        """Return a command and its environment, in which the programs of this one come first."""
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")}
        env |= {"HOME": str(self.home), "PATH": f"{self.bin}{os.pathsep}{env['PATH']}", "COLUMNS": "120"}
        return [str(word) for word in words], env

    def run(self, *words: str | Path) -> str:
        """Return what a command prints; a failure ends the script."""
        command, env = self.command(*words)
        done = subprocess.run(command, cwd=self.home, env=env, text=True, capture_output=True, check=False)
        if done.returncode:
            sys.exit(f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return done.stdout

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        """Start a command whose output is read as it comes."""
        command, env = self.command(*words)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=self.home, env=env, text=True, **pipes)

    def install(self, *what: str | Path) -> None:
        """Install by pip."""
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what)


def build(out: Path) -> Path:
    """Return the wheel, built in isolation, and checked."""
    builder = Environment(sys.executable, out / "build")
    builder.run(sys.executable, "-m", "build", "--wheel", "--outdir", out, ROOT)
    [wheel] = out.glob("*.whl")
    builder.run(sys.executable, "-m", "twine", "check", "--strict", wheel)
    return wheel


def interpreters() -> dict[str, str]:
    """Return the Pythons that work here, by version: on the path, or installed by pyenv."""
    found = {OWN: sys.executable}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in VERSIONS:
        places = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python{version}"))]
        for python in filter(None, places):
            works = subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True, check=False)
            if works.returncode == 0:
                found.setdefault(version, str(python))
    return found


def compile_and_help(environment: Environment, wheel: Path) -> str:
    """Byte-compile the wheel and show the help, which needs no PyTorch."""
    environment.install("--no-deps", wheel)
    environment.install("rich", "cyclopts")
    [package] = environment.bin.parent.glob("lib/python*/site-packages/octavo")
    environment.run("python", "-W", "error", "-m", "compileall", "-q", "-f", package)
    environment.run("octavo", "train", "--help-all")
    return "compiled, and its help shown"


def ten_steps(environment: Environment, wheel: Path, *constraints: str | Path) -> str:
    """Install the wheel without extras, import it, examine the machine, and train ten steps."""
    environment.install(wheel, *constraints)
    found = environment.run("python", "-c", "import octavo; print(octavo.__file__)")
    if str(environment.home) not in found:
        sys.exit(f"octavo was imported from {found.strip()}, not from the wheel")
    environment.run("octavo", "doctor", "--device", "cpu")
    out = environment.run("octavo", "train", "--preset", "tiny", "--steps", "10", "--out", "first")
    if not re.search(r"held-out loss [+-]\S+ % relative to bf16", " ".join(out.lower().split())):
        sys.exit(f"no verdict at the end of ten steps:\n{out[-2000:]}")
    torch = environment.run("python", "-c", "import torch; print(torch.__version__)").strip()
    return f"ten steps with PyTorch {torch}"


def oldest_torch() -> str:
    """Return the oldest PyTorch that the package allows, as a requirement."""
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (lowest,) = (line for line in metadata["project"]["dependencies"] if line.startswith("torch>="))
    return lowest.replace(">=", "==") + ".*"


def cpu_of_help(environment: Environment) -> float:
    """Return the seconds of CPU of `octavo --help`, the least of all calls until one is fast enough."""
    took: list[float] = []
    while len(took) < CALLS and min(took, default=HELP + 1) > HELP:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment.run("octavo", "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    if min(took) > HELP:
        sys.exit(f"`octavo --help` took {min(took):.2f} s of CPU; at most {HELP}")
    return min(took)


class Newcomer:
    """Follows the commands and Python blocks of the README in their order, from a wheel in place of the clone."""

    def __init__(self, environment: Environment, wheel: Path) -> None:
        self.environment, self.wheel = environment, wheel
        self.installed = 0.0
        self.first_loss = 0.0

    def follow(self, readme: str) -> str:
        """Follow all blocks and return a line about it; a step that fails ends the script."""
        for language, text in BLOCK.findall(readme):
            if language == "python":
                printed = self.environment.run("python", "-c", text).strip()
                shown = SHOWN.search(readme, readme.index(text))
                lines = iter(printed.splitlines())
                if shown is None or not all(line in lines for line in shown[1].splitlines()):  # in this order
                    sys.exit(f"README: the Python block prints something else than is shown:\n{printed}")
            else:
                for line in text.splitlines():
                    self.shell(line)
        if not 0 < self.first_loss <= FIRST_LOSS:
            sys.exit(f"{self.first_loss:.0f} s from the installation to the first FP8 loss; at most {FIRST_LOSS}")
        return f"the README followed; the first FP8 loss {self.first_loss:.0f} s after the installation"

    def shell(self, line: str) -> None:
        """Run a line of a shell block. The tests need the clone and are left out."""
        words = shlex.split(line, comments=True)
        if words[:2] == ["pip", "install"]:
            self.environment.install(*(word.replace(".", str(self.wheel), 1) for word in words[2:]), *CONSTRAINTS)
            self.installed = time.perf_counter()
        elif words == ["make", "demo"]:
            dry = subprocess.check_output(["make", "--no-print-directory", "--dry-run", "demo"], cwd=ROOT, text=True)
            self.demo(shlex.split(dry.splitlines()[-1].replace(".venv/bin/", "")))
        elif words[:2] == ["octavo", "dashboard"]:
            self.dashboard(words)
        elif "config.json" in words:
            return  # a model of the reader's
        elif words[0] == "octavo":
            self.environment.run(*words)
        elif words != ["make", "test"]:
            sys.exit(f"README: a newcomer cannot follow '{line}'")

    def demo(self, words: list[str]) -> None:
        """Train until the first line of losses, then interrupt: it must stop with a checkpoint."""
        with self.environment.start(*words) as run:
            assert run.stdout is not None
            lines = []
            for line in run.stdout:
                lines.append(line)
                if re.match(r"\s+1(\s+\d+\.\d+){2}", line):
                    self.first_loss = time.perf_counter() - self.installed
                    run.send_signal(signal.SIGINT)
            if run.wait() != 130 or not self.first_loss:
                sys.exit(f"{shlex.join(words)}: exit code {run.returncode}\n{''.join(lines)[-2000:]}")

    def dashboard(self, words: list[str]) -> None:
        """Serve the page until it shows the run of the demo."""
        with self.environment.start(*words, "--port", "0") as server:
            assert server.stdout is not None
            said = server.stdout.readline()
            address = re.search(r"http://\S+", said)
            runs = urllib.request.urlopen(f"{address[0]}/api/runs").read() if address else b""
            server.send_signal(signal.SIGINT)
        if b'"demo"' not in runs or server.returncode:
            sys.exit(f"{shlex.join(words)}: exit code {server.returncode}, {said}{runs[:500]!r}")


CONSTRAINTS = ("-c", ROOT / "constraints.txt")


def main() -> None:
    """Build, check, install, import, examine and train."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a child of a background job would ignore it
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        wheel = build(home)
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, metadata checked", flush=True)
        found = interpreters()
        every = os.environ.get("OCTAVO_WHEEL_PYTHONS") == "all"
        for version in VERSIONS:
            if version not in found:
                print(f"Python {version}: not found here, not tried", flush=True)
                continue
            environment = Environment(found[version], home / version)
            if version == OWN:
                done = ten_steps(environment, wheel, *CONSTRAINTS)
                done += f"; help in {cpu_of_help(environment):.2f} s of CPU; "
                done += Newcomer(environment, wheel).follow((ROOT / "README.md").read_text(encoding="utf-8"))
                if every:
                    oldest = Environment(found[version], home / "oldest")
                    done += f"; {ten_steps(oldest, wheel, oldest_torch())}"
            elif every:
                done = ten_steps(environment, wheel)
            else:
                done = compile_and_help(environment, wheel)
            print(f"Python {version}: {done}", flush=True)
            shutil.rmtree(environment.home)


if __name__ == "__main__":
    main()
