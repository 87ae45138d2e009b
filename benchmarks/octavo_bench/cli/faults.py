"""What guardrails make of faults."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.cli.flags import positive
from octavo_bench.cli.app import Json, Names, Write, bench, device_named, finish, printer


@bench.command
def faults(
    *,
    fault: Names = (),
    steps: int = 160,
    device: str = "auto",
    out: Path | None = None,
    write: Write = None,
    json_output: Json = False,
) -> int:
    """Strike a small run with faults, one run each, and compare with the same run undisturbed.

    Exits with 1 where a fault was not found, was attributed wrongly, or cost 1 % of the loss.

    Examples:

        octavo bench faults
        octavo bench faults --fault "bit flip" --steps 60

    Parameters
    ----------
    fault
        Faults to strike with; all where it is not given.
    steps
        Of each run; the fault strikes after two fifths of them.
    device
        cuda or cpu; auto takes the GPU where there is one.
    out
        Directory for the runs, to be looked at with `octavo dashboard`; by default they are not kept.
    """
    from octavo.errors import ConfigError, did_you_mean
    from octavo_bench.accuracy.faults import FAULTS, bench_faults

    for name in fault:
        if name not in FAULTS:
            near = did_you_mean(name, FAULTS)
            raise ConfigError(f"--fault: there is no fault '{name}'.{near} Faults: {', '.join(FAULTS)}.")
    chosen = [FAULTS[name] for name in fault or FAULTS]
    device, say = device_named(device), printer(json_output)
    with tempfile.TemporaryDirectory() as passing:
        rows = bench_faults(
            chosen,
            out or Path(passing),
            steps=positive("--steps", steps),
            device=device,
            report=lambda r: say(_line(r)),
        )
    flags = "".join(f" --fault '{name}'" for name in fault)
    command = f"octavo bench faults{flags} --steps {steps} --device {device}"
    failed = finish("faults", rows, write, json_output, command, device=device)
    return failed or int(not all(row["recovered"] for row in rows))


def _line(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return f"{row['fault']}: {row['error']}"
    verdict = "recovered" if row["recovered"] else "NOT recovered"
    found = f"{row['cause'] or 'nothing found'}{', ' + row['layer'] if row['layer'] else ''}"
    return (
        f"{row['fault']}: struck at {row['struck_step']}, detected at {row['detected_step']}, {found};"
        f" {row['action'] or 'no action'}; {verdict}, held-out loss {row['final_loss_change']:+.2f} %"
    )
