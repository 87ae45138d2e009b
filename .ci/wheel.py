"""Build the wheel and use it as a stranger does: in a bare virtual environment of each Python that is here.

`make wheel` runs it. PyTorch and the other dependencies come from the configured index; where the environment of this
script has them already and is of the same Python, they are taken from there, so that nothing is downloaded twice.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
FIRST_LOSS = 90
"""Seconds from the installation to the first FP8 loss."""


def run(*command: str | Path, where: Path, **more: str) -> str:
    """Run a command outside the clone and return what it prints; a failure ends the script."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | more
    done = subprocess.run(
        [str(part) for part in command], cwd=where, env=env, text=True, capture_output=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def build(out: Path) -> Path:
    """Return the wheel, built without isolation if its backend is here, and checked."""
    isolation = ["--no-isolation"] if _has("hatchling") and _has("editables") else []
    run(sys.executable, "-m", "build", "--wheel", *isolation, "--outdir", out, ROOT, where=out)
    [wheel] = out.glob("*.whl")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, where=out)
    return wheel


def _has(package: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, check=False).returncode == 0


def use(python: str, wheel: Path, home: Path) -> str:
    """Install the wheel for a Python, train ten steps with it, and return a line about that."""
    environment = home / "env"
    run(python, "-m", "venv", environment, where=home)
    own = environment / "bin" / "python"
    shared = _shared_packages(own)
    if shared is not None:  # the dependencies, but neither the clone nor what only developers have
        [site] = (environment / "lib").glob("python*/site-packages")
        (site / "shared.pth").write_text(f"{shared}\n", encoding="utf-8")
    run(own, "-m", "pip", "install", "--quiet", *(["--no-deps"] if shared else []), wheel, where=home)
    began = time.perf_counter()
    octavo = environment / "bin" / "octavo"
    found = run(own, "-c", "import octavo, sys; print(octavo.__file__)", where=home)
    if str(environment) not in found:
        sys.exit(f"octavo was imported from {found.strip()}, not from the wheel")
    run(octavo, "doctor", "--device", "cpu", where=home)
    out = run(octavo, "train", "--preset", "tiny", "--steps", "10", "--out", "runs/first", where=home, HOME=str(home))
    took = time.perf_counter() - began
    if "Held-out loss in FP8" not in out:
        sys.exit(f"no verdict at the end of ten steps:\n{out[-2000:]}")
    if took > FIRST_LOSS:
        sys.exit(f"{took:.0f} s from the installation to the first FP8 loss; at most {FIRST_LOSS}")
    return f"{run(own, '--version', where=home).strip()}: ten steps, {took:.0f} s after the installation"


def _shared_packages(own: Path) -> str | None:
    """Return the folder of this environment's packages if it is of the same Python."""
    version = "import sys; print(sys.version_info[:2])"
    same = subprocess.check_output([own, "-c", version], text=True) == subprocess.check_output(
        [sys.executable, "-c", version], text=True
    )
    import sysconfig

    return sysconfig.get_path("purelib") if same else None


def pythons() -> list[str]:
    """Return the Pythons to try: the newer ones only if their PyTorch can be installed (OCTAVO_WHEEL_PYTHONS=all)."""
    if os.environ.get("OCTAVO_WHEEL_PYTHONS") != "all":
        return [sys.executable]
    return [found for version in VERSIONS if (found := shutil.which(f"python{version}"))]


def main() -> None:
    """Build, check, install, import, examine and train."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        wheel = build(home)
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, metadata checked")
        for python in pythons():
            own = home / Path(python).name
            own.mkdir()
            print(use(python, wheel, own), flush=True)


if __name__ == "__main__":
    main()
