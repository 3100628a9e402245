"""Turn frozen dataclasses into plain JSON values, or words of a command line, and back, strictly.

One codec serves `plan.json`, `events.jsonl` and the channel. It accepts exactly the declared fields
with exactly the declared types: a peer or a file can't add anything else. Pickle is not used
anywhere (`docs/design.md`, rule 7).
"""

import base64
import binascii
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar, Union

from torchmuster.errors import UsageError

T = TypeVar("T")


class CodecError(ValueError):
    """A value does not have the declared shape; the message names the field."""


def to_plain(value: Any) -> Any:
    """Return `value` as dicts, lists, strings, numbers, booleans and None; bytes become base64."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = _field_types(type(value))
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value


def from_plain(cls: type[T], value: Any, where: str = "") -> T:
    """Return an instance of the dataclass `cls` made from plain values.

    Raises:
        CodecError: A field is missing, unknown or of another type.
    """
    if not isinstance(value, dict):
        raise CodecError(f"{where or cls.__name__}: expected an object")
    wanted = _field_types(cls)  # type: ignore[arg-type]  # a class is hashable
    unknown = value.keys() - wanted.keys()
    if unknown:
        raise CodecError(f"{where or cls.__name__}: unknown field {min(map(str, unknown))}")
    given: dict[str, Any] = {}
    for name, (annotation, required) in wanted.items():
        if name in value:
            given[name] = _convert(annotation, value[name], f"{where}.{name}" if where else name)
        elif required:
            raise CodecError(f"{where or cls.__name__}: field {name} is missing")
    return cls(**given)


@functools.cache
def _field_types(cls: type[Any]) -> dict[str, tuple[Any, bool]]:
    hints = typing.get_type_hints(cls)
    return {
        field.name: (
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
    }


def _convert(annotation: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(annotation)
    if origin is Union or origin is types.UnionType:
        return _convert_union(typing.get_args(annotation), value, where)
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            raise CodecError(f"{where}: expected a list")
        item_type = typing.get_args(annotation)[0]
        items = [_convert(item_type, item, f"{where}[{i}]") for i, item in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin is dict:
        if not isinstance(value, dict):
            raise CodecError(f"{where}: expected an object")
        item_type = typing.get_args(annotation)[1]
        return {
            str(key): _convert(item_type, item, f"{where}.{key}") for key, item in value.items()
        }
    return _convert_scalar(annotation, value, where)


def _convert_union(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and types.NoneType in choices:
        return None
    rest = [choice for choice in choices if choice is not types.NoneType]
    for choice in rest[:-1]:
        try:
            return _convert(choice, value, where)
        except CodecError:
            continue
    return _convert(rest[-1], value, where)


def _convert_scalar(annotation: Any, value: Any, where: str) -> Any:
    if annotation is Any:
        return value
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return from_plain(annotation, value, where)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        try:
            return annotation(value)
        except ValueError:
            raise CodecError(f"{where}: unknown word {str(value)[:40]!r}") from None
    if annotation is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise CodecError(f"{where}: the number is too large") from None
    if annotation is bytes and type(value) is str:
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise CodecError(f"{where}: expected base64") from None
    if type(value) is not annotation:
        name = getattr(annotation, "__name__", str(annotation))
        raise CodecError(f"{where}: expected {name}, got {type(value).__name__}")
    return value


def to_words(order: Any) -> list[str]:
    """Return `--name=value` for each field that says something; a `command` stands behind `--`."""
    words: list[str] = []
    for field in dataclasses.fields(order):
        value, option = getattr(order, field.name), f"--{field.name.replace('_', '-')}"
        if field.name == "command":
            words += ["--", *value]
        elif isinstance(value, tuple):
            words += [f"{option}={item}" for item in value]
        elif value != field.default:
            words.append(option if value is True else f"{option}={value}")
    return words


def from_words(cls: type[T], words: Sequence[str]) -> T:
    """Return the value that `to_words` has written.

    Raises:
        UsageError: The words are not of this value, e.g. of another version of muster.
    """
    own, command = list(words), None
    if "--" in own:
        at = own.index("--")
        own, command = own[:at], own[at + 1 :]
    types = typing.get_type_hints(cls)
    plain: dict[str, Any] = {} if command is None else {"command": command}
    try:
        for word in own:
            option, has_value, text = word.partition("=")
            name = option.removeprefix("--").replace("-", "_")
            kinds = (types.get(name), *typing.get_args(types.get(name)))
            if typing.get_origin(kinds[0]) is tuple:
                plain.setdefault(name, []).append(text)
            else:
                plain[name] = (int(text) if int in kinds else text) if has_value else True
        return from_plain(cls, plain)
    except ValueError as error:
        raise UsageError(
            "a program of muster does not understand how it was started",
            where=" ".join(words),
            why=str(error),
            fix="what starts it is of another version of muster: start the run or submit the job again",
        ) from error
