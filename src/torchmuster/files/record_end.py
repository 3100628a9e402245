"""What the end of a run's record says to whoever goes on with the run."""

import contextlib
import json

from torchmuster.files.layout import RunDir
from torchmuster.files.tail import last_lines
from torchmuster.model.plan import RunPlan

_LINES = 200  # are searched for the last attempt


def trained_last(plan: RunPlan, run_dir: RunDir) -> frozenset[int]:
    """Return the places that had ranks in the last attempt; none where that can't be read."""
    places = {name: place for place, name in enumerate(plan.node_names)}
    for line in reversed(last_lines(run_dir.events, _LINES, _LINES << 10)):
        if '"event":"attempt_started"' in line:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                names = [node["node"] for node in json.loads(line)["nodes"]]
                return frozenset(places[name] for name in names if name in places)
    return frozenset()
