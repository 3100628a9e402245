"""State as plain values and tensors, for the manifest: nothing in it runs code when it is loaded.

`pack` turns what `state_dict()` methods return into JSON values and a table of tensors; `unpack` is
its inverse. JSON has no tuples, no whole-number keys, no infinities and no arrays: those are
tagged.
"""

import base64
import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torchmuster.errors import MusterError

_TAG = "$"
_MAX_DEPTH = 150
_SCALAR = re.compile(r"[<>|=][biufc]\d{1,2}")


class SnapshotError(MusterError):
    """A snapshot can't be written, or doesn't fit what it is loaded into."""

    exit_code = 10


class MisfitError(SnapshotError):
    """The snapshot does not fit the script, and another attempt can't change that."""

    muster_final = True


class DamagedError(SnapshotError):
    """A snapshot's files are proved to differ from what was written."""

    muster_final = True


class UnreadableError(SnapshotError):
    """A snapshot could not be read; another attempt may succeed."""


class ChangedError(SnapshotError):
    """A tensor was changed while it was copied."""


class NoRoomError(SnapshotError):
    """A node's memory has no room for a snapshot."""


class NoGoodSnapshotError(SnapshotError):
    """All snapshots are damaged or have vanished: only the user may decide to start over."""

    muster_final = True


class VanishedError(SnapshotError):
    """The folder of the snapshots has vanished during the run; a retry would not find them."""

    muster_final = True


def vanished(folder: str, step: int) -> VanishedError:
    """Return the error of a save into a folder that no longer exists."""
    return VanishedError(
        f"the folder of the snapshots has vanished, so step {step} is not saved",
        where=folder,
        why="it was there when the run began, and is not made anew",
        fix="was it removed, or is its file system not mounted any more?",
    )


def pack(value: Any, path: str, tensors: dict[str, torch.Tensor], depth: int = 0) -> Any:
    """Return `value` as JSON values; its tensors go into `tensors` by their path.

    Raises:
        SnapshotError: A value is of a type that only running code could restore.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if depth > _MAX_DEPTH:
        raise MisfitError(
            f"a value nested more than {_MAX_DEPTH} deep can't be saved",
            where=path,
        )
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return _pack_tensor(value, path, tensors)
    if isinstance(value, (float, int, complex, np.generic)):
        return _pack_number(value, path)
    if isinstance(value, Mapping):
        return _pack_mapping(value, path, tensors, depth)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _pack_sequence(value, path, tensors, depth)
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, (torch.dtype, torch.device)):
        return {_TAG: type(value).__name__, "v": str(value).removeprefix("torch.")}
    raise _refusal(f"a value of type `{type(value).__module__}.{type(value).__qualname__}`", path)


def _refusal(kind: str, path: str) -> SnapshotError:
    return MisfitError(
        f"{kind} can't be saved",
        where=path,
        why="a snapshot contains tensors, numbers, text, lists, tuples, sets and dicts: nothing that"
        " would have to run code when it is loaded",
        fix="give the object state_dict() and load_state_dict() that use only these",
    )


def _pack_tensor(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    plain: dict[str, Any] = {_TAG: "tensor"}
    if isinstance(value, np.ndarray):
        plain = {_TAG: "array", "shape": list(value.shape)}
        try:
            # torch warns about read-only arrays, and refuses the other byte order.
            order = value.dtype.newbyteorder("=")
            value = torch.from_numpy(np.require(value, order, ("C", "W")))
        except (TypeError, ValueError):
            raise _refusal(f"a numpy array of type {value.dtype}", path) from None
    elif value.layout != torch.strided or value.is_quantized or value.is_meta:
        kind = "meta" if value.is_meta else f"{value.layout}, {value.dtype}"
        raise _refusal(f"a tensor that is not plain and dense ({kind})", path)
    path = _unused(path, tensors)
    tensors[path] = value.detach()
    return plain | {"path": path}


def _unused(path: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return `path`, with marks if a key with a dot has led to the same path."""
    while path in tensors:
        path += "'"
    return path


def _pack_number(value: Any, path: str) -> Any:
    if isinstance(value, np.generic):
        if value.dtype.kind not in "biufc":
            raise _refusal(f"a numpy scalar of type {value.dtype}", path)
        return {_TAG: "scalar", "dtype": value.dtype.str, "v": value.tobytes().hex()}
    if isinstance(value, complex):
        parts = [_pack_number(part, path) for part in (value.real, value.imag)]
        return {_TAG: "complex", "v": parts}
    if isinstance(value, int):  # a subclass, such as an IntEnum
        return int(value)
    return float(value) if math.isfinite(value) else {_TAG: "float", "v": repr(float(value))}


def _pack_mapping(
    value: Mapping[Any, Any], path: str, tensors: dict[str, torch.Tensor], depth: int
) -> Any:
    if all(isinstance(key, str) and not key.startswith(_TAG) for key in value):
        return {key: pack(item, f"{path}.{key}", tensors, depth + 1) for key, item in value.items()}
    pairs = [
        [_pack_key(key, f"{path}.key", depth), pack(item, f"{path}.{key}", tensors, depth + 2)]
        for key, item in value.items()
    ]
    return {_TAG: "dict", "v": pairs}


def _pack_key(value: Any, path: str, depth: int) -> Any:
    """Return a dict's key or a set's member, neither of which may contain a tensor."""
    tensors: dict[str, torch.Tensor] = {}
    plain = pack(value, path, tensors, depth + 2)
    if tensors:
        raise _refusal("a tensor as a key or in a set", path)
    return plain


def _pack_sequence(value: Any, path: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    if isinstance(value, (set, frozenset)):
        members = [_pack_key(item, path, depth) for item in sorted(value, key=repr)]
        return {_TAG: "set" if isinstance(value, set) else "frozenset", "v": members}
    items = [pack(item, f"{path}.{i}", tensors, depth + 1) for i, item in enumerate(value)]
    return items if isinstance(value, list) else {_TAG: "tuple", "v": items}


def unpack(value: Any, tensors: Mapping[str, torch.Tensor], depth: int = 0) -> Any:
    """Invert `pack`; tuples are plain tuples, mappings are dicts.

    Raises:
        DamagedError: `pack` does not write such a value.
    """
    if not isinstance(value, (dict, list)):
        return value
    if depth > _MAX_DEPTH + 2:  # a complex number contains tagged values
        raise DamagedError("the manifest is nested too deeply")
    if isinstance(value, list):
        return [unpack(item, tensors, depth + 1) for item in value]
    tag = value.get(_TAG)
    if tag is None:
        return OrderedDict((k, unpack(v, tensors, depth + 1)) for k, v in value.items())
    try:
        return _unpack_tagged(tag, value, tensors, depth)
    except DamagedError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise DamagedError(f"the manifest holds a malformed `{tag}`", why=repr(e)[:300]) from e


def _unpack_tagged(
    tag: Any, value: dict[str, Any], tensors: Mapping[str, torch.Tensor], depth: int
) -> Any:
    if tag == "tensor":
        return tensors[value["path"]]
    if tag == "array":
        return tensors[value["path"]].numpy().reshape(value["shape"])
    if tag == "scalar":
        if not _SCALAR.fullmatch(value["dtype"]):
            raise ValueError(value["dtype"])
        (scalar,) = np.frombuffer(bytes.fromhex(value["v"]), dtype=np.dtype(value["dtype"]))
        return scalar
    if tag == "bytes":
        return base64.b64decode(value["v"], validate=True)
    if tag == "float":
        return float(value["v"])
    if tag == "dtype":
        return dtype_named(value["v"])
    if tag == "device":
        return torch.device(value["v"])
    items = [unpack(item, tensors, depth + 1) for item in value["v"]]
    if tag == "dict":
        return {key: item for key, item in items}  # noqa: C416 (says that these are pairs)
    if tag == "complex":
        return complex(*items)
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](items)


def dtype_named(name: str) -> torch.dtype:
    """Return `torch.float32` for `float32`.

    Raises:
        DamagedError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedError(f"the manifest names a dtype that torch doesn't have: {name}")
    return dtype
