"""`octavo bench control`: by how much two BF16 runs of a preset differ, so that its gap has something to be beside.

A pair forks where the FP8 model of the preset begins to compute in FP8 (`run.bf16_first_steps`): from there one run
goes on, and one from weights moved by a unit in the last place of BF16 (`lanes.move`), both on the same batches.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import Parameter

from octavo._util.terminal import quantity
from octavo.lab.data.loader import Batch
from octavo.lab.train import control
from octavo.lab.train.config import RunConfig, assemble, load_preset
from octavo.lab.train.device import describe
from octavo.lab.train.evaluate import heldout_losses, paired_interval
from octavo.lab.train.schedule import learning_rate
from octavo.lab.train.setup import set_up
from octavo.lab.train.train_state import TrainState
from octavo_bench.kind import TO_STDOUT, Kind, Output, positive
from octavo_bench.lanes import ULP_SEED, move
from octavo_bench.render import Table
from octavo_bench.results import Row, newest

PACKAGED = Path(control.__file__).parent / "presets" / "control.json"
"""What the package has of the result files."""


def summary(directory: Path) -> str:
    """Return a line per preset: its control's interval, the number of pairs, and where they were measured."""
    shown = []
    for result in newest("control", directory):
        for preset, gaps in by_preset(result.rows).items():
            within = f"± {control.interval(gaps):.2g} % (95 %, {quantity(len(gaps), 'pair')})"
            shown.append(f"Two BF16 runs of preset `{preset}` differ by {within}.\n\n{result.origin}")
    return "\n\n".join(shown)


def by_preset(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return the gaps of each preset, percent."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["preset"], []).append(row["gap_percent"])
    return found


TABLES: dict[str, Table] = {"control": summary}
KIND: Kind = Kind(
    name="control",
    keys={"preset": str, "device": str, "seed": int, "steps": int, "fork": int, "heldout_loss": float,
          "gap_percent": float},
    columns=(
        ("preset", "{preset}"),
        ("seed", "{seed}"),
        ("BF16 loss", "{heldout_loss:.4f}"),
        ("gap", "{gap_percent:+z.4f} %"),
        ("over held-out sequences", "± {gap_95_percent:.4f} %"),
    ),
    names=2,
    tables=TABLES,
    session=("hardware",),
    may_fail=False,
)  # fmt: skip


def command(
    preset: str = "demo-cpu",
    /,
    *,
    seeds: Annotated[tuple[int, ...], Parameter(negative=(), consume_multiple=True)] = tuple(range(1, 9)),
    package: Annotated[bool, Parameter(negative=())] = False,
    output: Output = TO_STDOUT,
) -> int:
    """Measure the control of a preset of `octavo train`: pairs of BF16 runs, which its gap is compared with.

    Examples:

        octavo bench control --write benchmarks/results
        octavo bench control demo-cuda --seeds 1 2 3 4 --package

    Parameters
    ----------
    preset
        A preset with run.bf16_first_steps.
    seeds
        Seeds, one pair each.
    package
        Write the gaps into the package, which quotes them at the end of a run.
    """
    rows = output.keep(KIND, measure(preset, seeds), preset)
    if package:
        known = json.loads(PACKAGED.read_text(encoding="utf-8")) | by_preset(rows)
        PACKAGED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


def measure(preset: str, seeds: Sequence[int]) -> Iterator[Row]:
    """Yield a row per seed."""
    positive("--seeds", len(seeds))
    for seed in seeds:
        own = {"run": {"recipe": "bf16", "baseline": False, "seed": seed, "telemetry_every": 0}}
        yield {"preset": preset, **pair(assemble(load_preset(preset, cuda=False), ("bench control", own)))}


def pair(config: RunConfig) -> Row:
    """Train a pair of a BF16 run's configuration; return its held-out losses compared."""
    setup = set_up(config)
    (state,) = setup.states
    run = config.run
    batches = [next(setup.loader) for _ in range(run.steps)]
    _advance(state, config, batches, 0, run.bf16_first_steps)
    forked = copy.deepcopy((state.model.state_dict(), state.optimizer.state_dict()))
    losses = []
    for is_perturbed in (False, True):
        state.model.load_state_dict(forked[0])
        state.optimizer.load_state_dict(copy.deepcopy(forked[1]))
        if is_perturbed:
            move(state.parameters.values(), torch.Generator().manual_seed(ULP_SEED + run.seed))
        _advance(state, config, batches, run.bf16_first_steps, run.steps)
        losses.append(heldout_losses(state, setup.heldout))
    first, second = losses
    reference = float(first.mean())
    mean, half_width = paired_interval(second.tolist(), first.tolist())
    row = {"device": describe(setup.device), "seed": run.seed, "steps": run.steps, "fork": run.bf16_first_steps}
    row |= {"tokens": config.tokens, "heldout_tokens": sum(x.numel() for x, _ in setup.heldout)}
    gaps = {"gap_percent": 100 * mean / reference, "gap_95_percent": 100 * (half_width or 0.0) / reference}
    return {**row, "heldout_loss": reference, **gaps}


def _advance(state: TrainState, config: RunConfig, batches: Sequence[Batch], first: int, last: int) -> None:
    for step in range(first, last):
        inputs_BT, targets_BT = (ids.to(state.device) for ids in batches[step])
        lr = learning_rate(config.optimizer, step, config.run.steps, [])
        state.step(inputs_BT, targets_BT, step=step + 1, lr=lr, accumulate=config.run.accumulate)
