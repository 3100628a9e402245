"""The JSON that torchrun leaves of a failure: beside the logs, and where TORCHELASTIC_ERROR_FILE of the launcher says.

Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py (2.13).
"""

import contextlib
import json
from collections.abc import Mapping, Sequence

from torchmuster.model.failure import WorkerEnd, first_cause

VARIABLE = "TORCHELASTIC_ERROR_FILE"
_MAX_BYTES = 1 << 20


def read_recorded(path: str) -> str | None:
    """Return what the worker has written itself, by `@record`; None where that is nothing, or too much."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError:
        return None
    return data.decode(errors="replace") if 0 < len(data) <= _MAX_BYTES else None


def error_text(end: WorkerEnd, recorded: str | None, now_s: float) -> str | None:
    """Return the JSON on an end: the worker's own with its exit code, else what is known of its exception."""
    plain = None
    with contextlib.suppress(ValueError):
        plain = json.loads(recorded) if recorded is not None else None
    if not isinstance(plain, dict):
        if end.error is None:
            return None
        told = {"py_callstack": end.error.traceback, "timestamp": str(int(now_s))}
        what = f"{end.error.type_name}: {end.error.message}"
        plain = {"message": {"message": what, "extraInfo": told}}
    message = plain.get("message")
    code = -end.signum if end.signum is not None else end.exit_code
    if isinstance(message, dict) and code:
        message["errorCode"] = code
    return json.dumps(plain)


def root_cause(ends: Sequence[WorkerEnd], texts: Mapping[int, str]) -> str | None:
    """Return the JSON of the failure that explains the others of this node."""
    cause = first_cause([end for end in ends if end.rank in texts])
    return texts[cause.rank] if cause is not None else None
