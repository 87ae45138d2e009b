"""`Loop`: a state that makes steps, and parts that carry out all other duties of a run.

A step is `before_step` of each part, the step of the state, `is_due` of each part, then `after_step` of those that are
due. Parts nest as context managers do: `before_step` and `is_due` run from the outermost part to the innermost,
`after_step` back. So guardrails, which are inside log and checkpoints, undo a step before it is logged or saved.

A part gets what it needs when it is made, and never looks for another part. `octavo train` is a loop with all parts
(`octavo.lab.train.run`), `octavo.lab.guard.Loop` one with guardrails alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from torch import Tensor

Reads = Literal["nothing", "results", "weights"]


@dataclass(slots=True)
class Step:
    """A step that was made; tensors are on the device."""

    number: int
    """Number of steps made, this one included."""
    lr: float
    """Its learning rate."""
    loss: Tensor
    """Loss before the update, in nats per token, shape ()."""
    gradient_norm: Tensor
    """Gradient norm before clipping, shape ()."""
    baseline_loss: Tensor | None = None
    """Loss of the BF16 baseline on the same batch."""
    reads: set[Reads] = field(default_factory=set, kw_only=True)
    """`Part.reads` of the parts that are due."""


S = TypeVar("S", bound=Step, contravariant=True)
Made = TypeVar("Made", bound=Step, covariant=True)


class State(Protocol[Made]):
    """What a loop trains."""

    def make_step(self) -> Made:
        """Update the models by the next batch."""
        ...


class Part(Generic[S]):
    """A duty of a loop. Each part overrides what it needs; all ranks call all of it in the same order."""

    key = ""
    """Key of its state in the state of the loop; empty: its keys are among those of the loop."""
    reads: Reads = "nothing"
    """What `after_step` reads of a step. Inner parts check before that what cannot be taken back after it."""

    def before_step(self) -> bool:
        """Prepare the next step; return True if the run was rolled back instead, so that no step is made."""
        return False

    def is_due(self, step: S) -> bool:
        """Return True if `after_step` is to be called; asked of a step that was just made, without waiting for it."""
        return True

    def after_step(self, step: S) -> bool:
        """Carry out the duty after a step; return True if the run was rolled back, so that the step does not count."""
        return False

    def roll_back(self, to: int) -> None:
        """Forget all that followed `to` steps: the run is about to go back there."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""


class Loop(Generic[Made]):
    """Makes steps of a state, with parts around them.

    Args:
        state: what is trained.
        parts: outermost first.
    """

    def __init__(self, state: State[Made], parts: Sequence[Part[Made]] = ()) -> None:
        self.state, self.parts = state, [*parts]

    def step(self) -> Made | None:
        """Make a step and return it; None if the run was rolled back."""
        if any(part.before_step() for part in self.parts):
            return None
        step = self.state.make_step()
        due = [part for part in self.parts if part.is_due(step)]
        step.reads = {part.reads for part in due}
        return None if any(part.after_step(step) for part in reversed(due)) else step

    def roll_back(self, to: int) -> None:
        """Tell all parts that the run goes back."""
        for part in self.parts:
            part.roll_back(to)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all parts as JSON values."""
        found: dict[str, Any] = {}
        for part in self.parts:
            found |= {part.key: part.state_dict()} if part.key else part.state_dict()
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; a part whose key is missing stays as it is."""
        for part in self.parts:
            if not part.key:
                part.load_state_dict(state)
            elif part.key in state:
                part.load_state_dict(state[part.key])
