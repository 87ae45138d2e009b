"""The lab: what trains, watches and examines models with the library. Nothing in the library imports it.

    data models train cli             text, models, the loop and its checkpoints, the commands
    guard monitor                     faults of a run, diagnosed and repaired; its record, the dashboard
    doctor pilot sensitivity          checks of a set-up; whether FP8 pays; the cost of each layer
    evaluation memory                 quality of a run and of its export; a forecast of memory

Its rooms load on first use, so that the command line starts quickly.
"""

from __future__ import annotations

from octavo._util.lazy import lazy

_ROOMS = "cli data doctor evaluation guard memory models monitor pilot sensitivity train"
__getattr__ = lazy(__name__, dict.fromkeys(_ROOMS.split(), ""))


def __dir__() -> list[str]:
    return _ROOMS.split()
