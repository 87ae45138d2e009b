"""Portability: whether a run's weights keep their loss on other hardware, or have adapted to one accumulator.

The held-out loss of one set of weights, computed in four ways: as trained, with slow accumulation, from the same codes
with exact sums, and in BF16. Nothing else differs, so that a gap between them is due to rounding in training. There are
released models whose loss more than doubles on hardware with another accumulator.

Hopper's accumulator is native on Hopper and emulated elsewhere, which suits small models and few tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from octavo import kernels, recipes
from octavo.conversion import disabled
from octavo.errors import ConfigError
from octavo.kernels.explain import probe_operand
from octavo.kernels.gemm.accumulator import unsupported_reason
from octavo.lab.models.factory import count_parameters, model_name
from octavo.lab.train.checkpoint import Checkpoint
from octavo.lab.train.evaluate import heldout_losses
from octavo.lab.train.opening import RunSubject, open_run
from octavo.lab.train.setup import Setup
from octavo.lab.train.train_state import TrainState
from octavo_bench.kind import TO_STDOUT, Kind, Output, device_named
from octavo_bench.results import Row

TOLERANCE = 0.02
"""Nats per token. Rounding to FP8 alone makes a smaller difference."""
AS_TRAINED = "as trained"
KIND = Kind(
    name="portability",
    keys={
        "model": str, "recipe": str, "step": int, "computation": str, "heldout_loss": float, "difference": float,
    },
    columns=(
        ("computation", "{computation}"),
        ("held-out loss, nats per token", "{heldout_loss:.4f}"),
        ("difference to that as trained", "{difference:+z.4f}"),
        ("products", "{products}"),
    ),
    derived=lambda row: {"products": ", ".join(f"{n} x {name}" for name, n in row["kernels"].items()) or "no FP8"},
    may_fail=False,
)  # fmt: skip


def probe(run: Path, *, device: str = "auto", tokens: int | None = None) -> Iterator[Row]:
    """Yield the held-out loss of a run's newest weights in each way, one row each, `as trained` first.

    Args:
        run: directory of a run of `octavo train`, or of one of its checkpoints.
        device: device of the computation, as `run.device`.
        tokens: held-out tokens, in place of the run's `eval_tokens`.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
        ConfigError: the run was in BF16.
        DataError: the run's text no longer exists.
    """
    subject = _opened(run, device, tokens)
    setup = subject.setup()
    lane, about = setup.states[0], _about(subject.trained, setup)
    trained = None
    for name, how in _ways(lane, setup):
        with kernels.record() as ledger, how:
            losses = heldout_losses(lane, setup.heldout)
        trained = losses if trained is None else trained
        figures = {"heldout_loss": float(losses.mean()), "difference": float((losses - trained).mean())}
        ran = {"kernels": dict(ledger.gemms), "fallbacks": ledger.fallbacks}
        yield {**about, "computation": name, **figures, **ran}


def alarm(rows: Sequence[Mapping[str, Any]], tolerance: float = TOLERANCE) -> str | None:
    """Return a message if a way differs from `as trained` by more than `tolerance` nats, or None."""
    apart = [row for row in rows if not abs(row["difference"]) <= tolerance]
    if not apart:
        return None
    worst = max(apart, key=lambda row: abs(row["difference"]))
    return (
        f"the weights are not portable: {worst['computation']}, the held-out loss is {worst['heldout_loss']:.4f}, "
        f"{worst['difference']:+z.4f} against {rows[0]['heldout_loss']:.4f} as trained. More than {tolerance:g} shows "
        "that they have adapted to the rounding of one accumulator. Continue training with slow accumulation or in "
        "BF16 before you serve them elsewhere."
    )


def _opened(run: Path, device: str, tokens: int | None) -> RunSubject:
    """Return the run, for its FP8 model alone, on `device`."""
    text: dict[str, Any] = {} if tokens is None else {"eval_tokens": tokens}
    subject = open_run(run, by="octavo bench portability", device=device, **text)
    if "fp8" not in subject.trained.tensors:
        raise ConfigError(f"{subject.trained.path}: was trained in BF16 only. There is no FP8 rounding to test.")
    return subject


def _about(found: Checkpoint, setup: Setup) -> dict[str, Any]:
    """Return the keys of every row on the model, the text, and the accumulator behind `as trained` and `slow`."""
    config = setup.config
    about = {
        "model": model_name(config.model.architecture, count_parameters(setup.states[0].model)),
        "recipe": recipes.load(config.run.recipe).name,
        "step": found.step,
        "heldout_tokens": sum(targets_BT.numel() for _, targets_BT in setup.heldout),
        "accumulator": "Hopper's" if _is_hopper(setup.device) else "Hopper's, emulated",
    }
    reason = _not_hoppers(setup)
    return about | ({"accumulator": f"this device's: {reason}"} if reason else {})


def _ways(lane: TrainState, setup: Setup) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    own = _is_hopper(setup.device) or _not_hoppers(setup) is not None
    yield AS_TRAINED, nullcontext() if own else kernels.gemm_by("hopper")
    yield "with slow accumulation", kernels.gemm_by("slow" if own else "hopper-slow")
    yield "with exact sums", kernels.gemm_by("exact")
    yield "in BF16", disabled(lane.model)


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _not_hoppers(setup: Setup) -> str | None:
    """Return the reason why Hopper's tensor cores do not compute fprop, or None."""
    used = setup.plan.recipes.values() if setup.plan is not None else ()
    for recipe in (recipe for recipe in used if recipe.fprop.is_fp8):
        operands = (recipe.fprop.input, recipe.fprop.weight)
        if reason := unsupported_reason(*(probe_operand(o.granularity, o.format, "cpu") for o in operands)):
            return reason
    return None


def command(
    run: Path,
    /,
    *,
    tolerance: float | None = None,
    tokens: int | None = None,
    device: str = "auto",
    output: Output = TO_STDOUT,
) -> int:
    """Compute one model's held-out loss as trained, with slow accumulation, with exact sums and in BF16.

    Exits with 1 if they differ by more than the tolerance: the weights have adapted to one accumulator. Elsewhere than
    on Hopper its accumulator is emulated, which is slow: for small models.

    Examples:

        octavo bench portability runs/demo
        octavo bench portability runs/demo/checkpoints/step-000300 --tokens 4096 --tolerance 0.01

    Parameters
    ----------
    run
        Directory of a run, or of one of its checkpoints.
    tolerance
        Largest difference from the loss as trained without an alarm, in nats per token; 0.02 by default.
    tokens
        Held-out tokens, in place of the run's `eval_tokens`.
    device
        cuda or cpu; auto takes the GPU if there is one.
    """
    flags: Row = {"tolerance": tolerance, "tokens": tokens}
    rows = output.keep(KIND, probe(run, device=device, tokens=tokens), run.name, device=device_named(device), **flags)
    about = "{model}, {recipe}, step {step}, {heldout_tokens:,} tokens; accumulator: {accumulator}"
    output.say(about.format(**rows[0]))
    message = alarm(rows, TOLERANCE if tolerance is None else tolerance)
    if message is not None:
        print(f"octavo: alarm: {message}", file=sys.stderr)
    return int(message is not None)
