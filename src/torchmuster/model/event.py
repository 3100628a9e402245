"""A line of `events.jsonl`: UTC time, name and fields, the same for every writer."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


def utc_now() -> str:
    """Return the time in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment_of(time: object) -> float | None:
    """Return a time of ISO 8601 in seconds since 1970; None where it is none."""
    if not isinstance(time, str):
        return None
    try:
        return datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError, OSError):  # the last two: of a year that no clock has
        return None


def event_line(time: str, name: str, fields: Mapping[str, Any]) -> str:
    """Return one event as a line with its newline."""
    line = {"time": time, "event": name, **fields}
    return json.dumps(line, separators=(",", ":")) + "\n"
