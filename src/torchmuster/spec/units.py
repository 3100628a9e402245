"""Durations and sizes as people write them: `30`, `30s`, `10m`, `1.5h`, `1h30m`, `PT1H30M`, `64Gi`."""

import re

_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|us|s|m|h|d|)")
_SECONDS = {"us": 1e-6, "ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_COMPOUND = re.compile(r"(?:\d+(?:ms|us|s|m|h|d))+")
_ISO = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?")
_SIZE = re.compile(r"(\d+)\s*(TiB|Ti|T|GiB|Gi|G|MiB|Mi|M|KiB|Ki|K|B|)")
# T, G, M and K are binary in the workflow format: one word, one meaning.
_BYTES = {"T": 1 << 40, "G": 1 << 30, "M": 1 << 20, "K": 1 << 10, "B": 1, "": 1}


def parse_seconds(text: str) -> float | None:
    """Return a duration in seconds, or None when the text is none."""
    match = _PATTERN.fullmatch(text.strip())
    return float(match.group(1)) * _SECONDS[match.group(2)] if match else None


def parse_timeout(text: str) -> float | None:
    """Return a duration in seconds from any form that the workflow format knows, and `1h30m`."""
    word = text.strip()
    simple = parse_seconds(word)
    if simple is not None:
        return simple
    if _COMPOUND.fullmatch(word):
        parts = re.findall(r"(\d+)(ms|us|s|m|h|d)", word)
        return sum(int(number) * _SECONDS[unit] for number, unit in parts)
    match = _ISO.fullmatch(word)
    if match is None or not any(match.groups()):
        return None
    days, hours, minutes, seconds = (float(group or 0) for group in match.groups())
    return days * 86400 + hours * 3600 + minutes * 60 + seconds


def parse_size(text: str) -> int | None:
    """Return a size in bytes from `64Gi`, `500M`, `1024`; None when the text is none."""
    match = _SIZE.fullmatch(text.strip())
    return int(match.group(1)) * _BYTES[match.group(2)[:1]] if match else None


def format_size(size_bytes: float) -> str:
    """Return a size for people, e.g. `30 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} TiB"
