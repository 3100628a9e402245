"""Durations as people write them: `30`, `30s`, `10m`, `1.5h`."""

import re

_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)")
_SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}


def parse_seconds(text: str) -> float | None:
    """Return a duration in seconds, or None when the text is none."""
    match = _PATTERN.fullmatch(text.strip())
    return float(match.group(1)) * _SECONDS[match.group(2)] if match else None
