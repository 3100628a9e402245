"""Messages between processes, encoded as one JSON object whose `type` is the class name.

If a message has a field `data` of bytes, they follow the JSON unencoded after a zero byte, which
JSON never contains.

A vocabulary is a subclass of `TypedMessage`; its messages are subclasses of that. `decode` accepts
only messages of the expected vocabulary, with exactly the declared fields (`model.codec`).

Subclasses become dataclasses automatically. Equality and `repr` are defined once in the base class,
because Python compiles generated methods for every class: that cost 50 ms in every start.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar, TypeVar, dataclass_transform

from torchmuster.core.model import codec


def utc_now() -> str:
    """Return the current time in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment_of(time: object) -> float | None:
    """Return an ISO 8601 time in seconds since 1970; None if invalid."""
    if not isinstance(time, str):
        return None
    try:
        return datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError, OSError):  # the last two: years out of range
        return None


def event_line(time: str, name: str, fields: Mapping[str, Any]) -> str:
    """Return a line of `events.jsonl`: UTC time, name and fields, with a newline."""
    line = {"time": time, "event": name, **fields}
    return json.dumps(line, separators=(",", ":")) + "\n"


M = TypeVar("M", bound="TypedMessage")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class TypedMessage:
    """A message; immutable, which mypy checks."""

    words: ClassVar[dict[str, type[Any]]] = {}

    def __init_subclass__(cls, *, is_word: bool = True) -> None:
        if TypedMessage in cls.__bases__:
            cls.words = {}
        elif is_word:
            cls.words[cls.__name__] = cls
        dataclass(kw_only=True, eq=False, repr=False)(cls)

    @classmethod
    def find_word(cls, name: str) -> type[Any] | None:
        """Return the message with this name; None if the vocabulary has none."""
        return cls.words.get(name)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({given})"

    __hash__ = None  # type: ignore[assignment]  # as of every value that may hold a dictionary


def encode(message: TypedMessage) -> bytes:
    """Return a message as one line of JSON, followed by its bytes if it has `data`."""
    data = getattr(message, "data", None)
    given = vars(message).items()
    plain = {name: codec.to_plain(value) for name, value in given if not isinstance(value, bytes)}
    plain["type"] = type(message).__name__
    text = json.dumps(plain, separators=(",", ":")).encode()
    return b"%b\0%b" % (text, data) if isinstance(data, bytes) else text


def decode(payload: bytes, vocabulary: type[M]) -> M:
    """Return the message in a payload.

    Raises:
        codec.CodecError: It is not a message of the vocabulary, or has other fields.
    """
    try:
        text, is_followed, data = payload.partition(b"\0")
        plain = json.loads(text)
        if is_followed:
            plain["data"] = data
        name = plain.pop("type")
        cls = vocabulary.find_word(name) if isinstance(name, str) else None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise codec.CodecError(f"not a message of muster: {error!r}") from None
    if cls is None:
        raise codec.CodecError(f"not a message of muster: {str(name)[:100]!r}")
    found: M = codec.from_plain(cls, plain)
    return found
