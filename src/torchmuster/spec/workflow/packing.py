"""Values of a template as JSON, to pass them to the child process that renders it."""

from typing import Any


def pack(value: Any) -> Any:
    """Return a value in a form for JSON: maps keep keys that are not text, dates become text."""
    if isinstance(value, dict):
        return {"map": [[pack(key), pack(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [pack(item) for item in value]}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def unpack(value: Any) -> Any:
    """Inverse of `pack`."""
    if not isinstance(value, dict):
        return value
    if "map" in value:
        return {unpack(key): unpack(item) for key, item in value["map"]}
    return [unpack(item) for item in value["list"]]
