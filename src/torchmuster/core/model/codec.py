"""Convert frozen dataclasses to plain JSON values or command-line options and back, strictly.

One codec serves `plan.json`, `events.jsonl` and the channel. It accepts exactly the declared fields
with exactly the declared types: a peer or a file can't add anything else. Records and messages
never use pickle (`docs/design.md`, rule 7).

A message between processes is one JSON object whose `type` is the class name. If it has a field
`data` of bytes, they follow the JSON unencoded after a zero byte, which JSON never contains. A
vocabulary is a subclass of `TypedMessage`; its messages are subclasses of that. `decode` accepts
only messages of the expected vocabulary.
"""

import base64
import binascii
import contextlib
import dataclasses
import enum
import functools
import itertools
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, TypeVar, Union, dataclass_transform

from torchmuster.errors import UsageError

T = TypeVar("T")


class CodecError(ValueError):
    """A value does not have the declared shape; the message names the field."""


_PLAIN = frozenset({str, int, float, bool, type(None)})


def to_plain(value: Any) -> Any:
    """Return `value` as dicts, lists, strings, numbers, booleans and None; bytes become base64."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple or kind is list:
        return list(value) if _PLAIN.issuperset(map(type, value)) else [*map(to_plain, value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_plain(getattr(value, name)) for name in _readers(kind)}  # type: ignore[arg-type]  # a class is hashable
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value


def from_plain(cls: type[T], value: Any) -> T:
    """Return an instance of the dataclass `cls` made from plain values.

    Raises:
        CodecError: A field is missing, unknown or of another type.
    """
    try:
        read: T = _read_fields(cls, value)
        return read
    except _UnfitError as unfit:
        place = unfit.place.removeprefix(".") or cls.__name__
        raise CodecError(f"{place}: {unfit.why}") from None


def known_of(cls: type[Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values in `plain` that are fields of `cls`."""
    return {name: plain[name] for name in _readers(cls) if name in plain}  # type: ignore[arg-type]  # a class is hashable


def fitting(cls: type[Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the declared fields of `cls` with valid values, to read what other versions wrote."""
    found = {}
    for name, (_, read, _) in _readers(cls).items():  # type: ignore[arg-type]  # a class is hashable
        with contextlib.suppress(KeyError, _UnfitError):
            read(plain[name])
            found[name] = plain[name]
    return found


_Reader = Callable[[Any], Any]
_Kinds = frozenset[type]


class _UnfitError(Exception):
    """A value does not fit; `place` is built only while it propagates: valid data costs nothing."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why
        self.place = ""

    def within(self, place: str) -> "_UnfitError":
        """Prepend the enclosing place, and return the error."""
        self.place = f"{place}{self.place}"
        return self


def _read_fields(cls: type[Any], value: Any) -> Any:
    if not isinstance(value, dict):
        raise _UnfitError("expected an object")
    readers = _readers(cls)  # type: ignore[arg-type]  # a class is hashable
    given: dict[str, Any] = {}
    for name, (kept, read, required) in readers.items():
        if name in value:
            item = value[name]
            try:
                given[name] = item if type(item) in kept else read(item)
            except _UnfitError as unfit:
                raise unfit.within(f".{name}") from None
        elif required:
            # An unknown field explains more: it was written by another version.
            raise _unknown(value, readers) or _UnfitError(f"field {name} is missing")
    if (unknown := _unknown(value, readers)) is not None:
        raise unknown
    return cls(**given)


def _unknown(value: dict[str, Any], readers: Mapping[str, Any]) -> _UnfitError | None:
    if value.keys() <= readers.keys():
        return None
    return _UnfitError(f"unknown field {min(map(str, value.keys() - readers.keys()))}")


@functools.cache
def _readers(cls: type[Any]) -> dict[str, tuple[_Kinds, _Reader, bool]]:
    """Return for each field: types accepted as they are, its reader, and whether it is required."""
    hints = typing.get_type_hints(cls)
    return {
        field.name: (
            _kept(hints[field.name]),
            _reader(hints[field.name]),
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
    }


@functools.cache
def _kept(annotation: Any) -> _Kinds:
    """Return the types whose values fit an annotation as they are, so that no reader is called."""
    if annotation in _PLAIN:
        return frozenset({annotation})
    if typing.get_origin(annotation) in (Union, types.UnionType):
        choices = typing.get_args(annotation)
        first = next(choice for choice in choices if choice is not types.NoneType)
        none = {types.NoneType} if types.NoneType in choices else set()
        return _kept(first) | none
    return frozenset()


@functools.cache
def _reader(annotation: Any) -> _Reader:
    """Return the cached reader for an annotation; messages have thousands of such values."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Union or origin is types.UnionType:
        return _union_reader(arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _record_reader(arguments)
    if origin in (tuple, list):
        return _items_reader(arguments[0], is_tuple=origin is tuple)
    if origin is dict:
        return _dict_reader(arguments[1])
    return _scalar_reader(annotation)


def _union_reader(choices: tuple[Any, ...]) -> _Reader:
    may_be_none = types.NoneType in choices
    *rest, last = [_reader(choice) for choice in choices if choice is not types.NoneType]

    def read(value: Any) -> Any:
        if value is None and may_be_none:
            return None
        for reader in rest:
            try:
                return reader(value)
            except _UnfitError:
                continue
        return last(value)

    return read


def _items_reader(annotation: Any, *, is_tuple: bool) -> _Reader:
    kept, reader = _kept(annotation), _reader(annotation)

    def read(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _UnfitError("expected a list")
        if kept.issuperset(map(type, value)):
            return tuple(value) if is_tuple else list(value)
        items = _read_each(itertools.repeat(reader), value)
        return tuple(items) if is_tuple else items

    return read


def _record_reader(annotations: tuple[Any, ...]) -> _Reader:
    readers = [_reader(annotation) for annotation in annotations]

    def read(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _UnfitError("expected a list")
        if len(value) != len(readers):
            raise _UnfitError(f"expected {len(readers)} items, got {len(value)}")
        return tuple(_read_each(readers, value))

    return read


def _read_each(readers: Iterable[_Reader], values: Sequence[Any]) -> list[Any]:
    items: list[Any] = []
    try:
        for reader, value in zip(readers, values, strict=False):
            items.append(reader(value))
    except _UnfitError as unfit:
        raise unfit.within(f"[{len(items)}]") from None
    return items


def _dict_reader(annotation: Any) -> _Reader:
    reader = _reader(annotation)

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _UnfitError("expected an object")
        found = {}
        for key, item in value.items():
            try:
                found[str(key)] = reader(item)
            except _UnfitError as unfit:
                raise unfit.within(f".{key}") from None
        return found

    return read


def _scalar_reader(annotation: Any) -> _Reader:
    if annotation is Any:
        return lambda value: value
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return functools.partial(_read_fields, annotation)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return functools.partial(_read_enum, annotation)
    name = getattr(annotation, "__name__", str(annotation))

    def read(value: Any) -> Any:
        if type(value) is annotation:
            return value
        if annotation is float and type(value) is int:
            try:
                return float(value)
            except OverflowError:
                raise _UnfitError("the number is too large") from None
        if annotation is bytes and type(value) is str:
            try:
                return base64.b64decode(value, validate=True)
            except (binascii.Error, ValueError):
                raise _UnfitError("expected base64") from None
        raise _UnfitError(f"expected {name}, got {type(value).__name__}")

    return read


def _read_enum(kind: type[enum.Enum], value: Any) -> enum.Enum:
    try:
        return kind(value)
    except ValueError:
        raise _UnfitError(f"unknown word {str(value)[:40]!r}") from None


def to_word(order: Any) -> str:
    """Return a value with nested parts as one command-line argument."""
    return json.dumps(to_plain(order))


def from_word(cls: type[T], words: Sequence[str]) -> T:
    """Return the value that `to_word` encoded in the only argument.

    Raises:
        UsageError: It does not fit this class, e.g. another version of muster wrote it.
    """
    try:
        (word,) = words
        return from_plain(cls, json.loads(word))
    except ValueError as error:
        raise _not_understood(words, error) from error


def to_arguments(order: Any) -> list[str]:
    """Return `--name=value` for each field with another value than its default.

    The values of a field `command` follow `--`.
    """
    words: list[str] = []
    for field in dataclasses.fields(order):
        value, option = getattr(order, field.name), f"--{field.name.replace('_', '-')}"
        if field.name == "command":
            words += ["--", *value]
        elif isinstance(value, tuple):
            words += [f"{option}={item}" for item in value]
        elif value != field.default:
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            words.append(option if value is True else f"{option}={value}")
    return words


def from_arguments(cls: type[T], words: Sequence[str]) -> T:
    """Return the value of `to_arguments`, or of an earlier version of it.

    Earlier versions wrote the first field without its name, and others as `--name value`.

    Raises:
        UsageError: The arguments do not fit this class, e.g. another version wrote them.
    """
    own, command = list(words), None
    if "--" in own:
        at = own.index("--")
        own, command = own[:at], own[at + 1 :]
    types = typing.get_type_hints(cls)
    plain: dict[str, Any] = {} if command is None else {"command": command}
    try:
        if own and not own[0].startswith("--"):
            plain[next(iter(types))] = own.pop(0)
        while own:
            option, has_value, text = own.pop(0).partition("=")
            name = option.removeprefix("--").replace("-", "_")
            kinds = (types.get(name), *typing.get_args(types.get(name)))
            if not has_value and bool not in kinds and own and not own[0].startswith("--"):
                has_value, text = "=", own.pop(0)
            number = next((kind for kind in (int, float) if kind in kinds), str)
            if typing.get_origin(kinds[0]) is tuple:
                plain.setdefault(name, []).append(text)
            else:
                plain[name] = number(text) if has_value else True
        return from_plain(cls, plain)
    except ValueError as error:
        raise _not_understood(words, error) from error


def _not_understood(words: Sequence[str], error: ValueError) -> UsageError:
    return UsageError(
        "a program of muster does not understand how it was started",
        where=" ".join(words),
        why=str(error),
        fix="what starts it is of another version of muster: start the run or submit the job again",
    )


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


@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,)
)
class TypedMessage:
    """A message; immutable, which mypy checks. Subclasses become dataclasses by themselves.

    Equality and `repr` are defined once, here: Python compiles generated methods for every class,
    which cost 50 ms in every start.
    """

    words: ClassVar[dict[str, type[Any]]] = {}

    def __init_subclass__(cls, *, is_word: bool = True) -> None:
        if TypedMessage in cls.__bases__:
            cls.words = {}
        elif is_word:
            cls.words[cls.__name__] = cls
        dataclasses.dataclass(kw_only=True, eq=False, repr=False)(cls)

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
    plain = {name: to_plain(value) for name, value in given if not isinstance(value, bytes)}
    plain["type"] = type(message).__name__
    text = json.dumps(plain, separators=(",", ":")).encode()
    return b"%b\0%b" % (text, data) if isinstance(data, bytes) else text


def decode(payload: bytes, vocabulary: type[M]) -> M:
    """Return the message in a payload.

    Raises:
        CodecError: It is not a message of the vocabulary, or has other fields.
    """
    try:
        text, is_followed, data = payload.partition(b"\0")
        plain = json.loads(text)
        if is_followed:
            plain["data"] = data
        name = plain.pop("type")
        cls = vocabulary.find_word(name) if isinstance(name, str) else None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CodecError(f"not a message of muster: {error!r}") from None
    if cls is None:
        raise CodecError(f"not a message of muster: {str(name)[:100]!r}")
    found: M = from_plain(cls, plain)
    return found
