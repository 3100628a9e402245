"""Hypothesis strategies for every dataclass of ours, made from its annotations."""

import dataclasses
import enum
import types
import typing
from typing import Any

from hypothesis import strategies as st

JSON_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
JSON_VALUES = st.recursive(
    JSON_SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def instances(cls):
    """Return a strategy for instances of a dataclass."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: values(hints[field.name]) for field in dataclasses.fields(cls)}
    return st.builds(cls, **fields)


def values(annotation):
    """Return a strategy for the values that an annotation allows."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(part) for part in parts])
    if origin is tuple and parts[-1] is not Ellipsis:
        return st.tuples(*map(values, parts))
    if origin is tuple:
        return st.lists(values(parts[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(st.text(), values(parts[1]), max_size=3)
    if annotation is Any:
        return JSON_VALUES
    if dataclasses.is_dataclass(annotation):
        return instances(annotation)
    if issubclass(annotation, enum.Enum):
        return st.sampled_from(annotation)
    return {
        bool: st.booleans(),
        int: st.integers(),
        float: st.floats(allow_nan=False),
        str: st.text(),
        bytes: st.binary(),
        types.NoneType: st.none(),
    }[annotation]
