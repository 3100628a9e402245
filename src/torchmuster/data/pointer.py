"""How a folder of checkpoints says which files are its last whole checkpoint.

CHECKPOINT.json                    written last: the number and the name of the manifest
checkpoint-<n>.json                the manifest: every file's name, object, size and SHA-256
checkpoint-<n>-<random>/<name>     the files; later manifests point here while they don't change
"""

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from torchmuster.data.faults import DataError, retrying
from torchmuster.data.fetch import Item
from torchmuster.data.names import unsafe_reason
from torchmuster.data.place import Store

POINTER = "CHECKPOINT.json"
FORMAT = "muster-checkpoint-1"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NUMBERED = re.compile(r"checkpoint-(\d{1,12})\.json")
_FOLDER = re.compile(r"checkpoint-(\d{1,12})-[0-9a-f]{8}/.+", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a checkpoint, and which object holds it."""

    name: str
    object: str
    size_bytes: int
    sha256: str
    mode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One whole checkpoint."""

    number: int
    created: str
    files: tuple[StoredFile, ...]


def manifest_name(number: int) -> str:
    """Return the name of a checkpoint's manifest."""
    return f"checkpoint-{number}.json"


def number_of(name: str) -> int | None:
    """Return the number of a manifest's name; None when it is none."""
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match else None


def folder_number(name: str) -> int | None:
    """Return the number in the folder of a checkpoint's object; None when it is none."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def encode_pointer(number: int) -> bytes:
    """Return the bytes that make a checkpoint the last whole one."""
    value = {"format": FORMAT, "number": number, "manifest": manifest_name(number)}
    return json.dumps(value).encode()


def encode(checkpoint: Checkpoint) -> bytes:
    """Return a manifest's bytes."""
    return json.dumps({"format": FORMAT, **asdict(checkpoint)}, indent=1).encode()


def read_pointer(place: Store) -> int | None:
    """Return the number of the last whole checkpoint; None when there is none.

    Raises:
        DataError: The pointer is damaged.
    """
    if retrying(lambda: place.stat(POINTER), place.url) is None:
        return None
    value = _read(place, POINTER)
    number = value.get("number")
    if not isinstance(number, int):
        raise _damaged(place, POINTER, "it holds no number")
    return number


def read_checkpoint(place: Store, number: int) -> Checkpoint:
    """Return a checkpoint's manifest.

    Raises:
        DataError: It is missing or damaged.
    """
    name = manifest_name(number)
    value = _read(place, name)
    try:
        files = tuple(StoredFile(**file) for file in value["files"])
        created = str(value["created"])
        good = all(
            isinstance(f.size_bytes, int)
            and isinstance(f.mode, int)
            and _SHA256.fullmatch(f.sha256)
            and not unsafe_reason(f.object)
            and not unsafe_reason(f.name)
            for f in files
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(place, name, f"{type(error).__name__}: {error}") from error
    if not good:
        raise _damaged(place, name, "a name, a size or a checksum in it is none")
    return Checkpoint(number=number, created=created, files=files)


def checkpoint_items(place: Store) -> list[Item] | None:
    """Return the files of the last whole checkpoint; None when this is no folder of checkpoints."""
    number = read_pointer(place)
    if number is None:
        return None
    return [
        Item(
            name=file.name,
            source=file.object,
            size_bytes=file.size_bytes,
            tag=file.sha256,
            sha256=file.sha256,
            mode=file.mode,
        )
        for file in read_checkpoint(place, number).files
    ]


def _read(place: Store, name: str) -> dict[str, Any]:
    data = retrying(lambda: place.read(name), f"{place.url}/{name}")
    try:
        value = json.loads(data)
    except ValueError as error:
        raise _damaged(place, name, str(error)) from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise _damaged(place, name, f"its format is not `{FORMAT}`")
    return value


def _damaged(place: Store, name: str, why: str) -> DataError:
    return DataError(
        "the list of a checkpoint's files is damaged", where=f"{place.url}/{name}", why=why
    )
