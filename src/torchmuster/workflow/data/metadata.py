"""Parse metadata and labels: `key=value`, or a YAML or JSON file of keys and values."""

import json
import os
from collections.abc import Sequence
from typing import Any

from torchmuster.core.plainfile import open_plain
from torchmuster.errors import UsageError

_MAX_BYTES = 1 << 20


def parse_metadata(words: Sequence[str], option: str = "--metadata") -> dict[str, Any]:
    """Return the values of `key=value` arguments and of files; later ones win.

    Raises:
        UsageError: An argument is neither, or a file is unreadable or has no keys and values.
    """
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if equals and key:
            values[key] = _scalar(text)
        elif os.path.isfile(word):
            values.update(_read(word, option))
        else:
            fix = f"{option} key=value or {option} FILE.yaml"
            raise UsageError(f"`{word}` is neither `key=value` nor a file", where=option, fix=fix)
    return values


def _scalar(text: str) -> Any:
    """Convert text to the number or boolean that it spells; otherwise return the text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (int, float, bool)) else text


def _read(path: str, option: str) -> dict[str, Any]:
    import yaml

    try:
        if os.path.getsize(path) > _MAX_BYTES:
            raise UsageError("the metadata are larger than 1 MiB", where=f"{option} {path}")
        with open_plain(path, or_descriptor=True) as file:
            value = yaml.safe_load(file.read().decode())
        # Dates and the like become text, because they are stored as JSON.
        plain = json.loads(json.dumps(value, default=str))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise UsageError("the metadata can't be read", where=f"{option} {path}", why=why) from error
    if not isinstance(plain, dict):
        raise UsageError("the file has no keys and values", where=f"{option} {path}")
    return plain
