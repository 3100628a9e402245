"""The files by which a folder of checkpoints names its last complete checkpoint.

CHECKPOINT.json                    written last: the number and the manifest's name
checkpoint-<n>.json                the manifest: every file's name, object, size, SHA-256, mode
checkpoint-<n>-<random>/<name>     the files; later manifests refer to unchanged ones
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from torchmuster.workflow.data.faults import DataError
from torchmuster.workflow.data.manifest import listed_file
from torchmuster.workflow.data.store import Entry, Store

POINTER = "CHECKPOINT.json"
FORMAT = "muster-checkpoint-1"
_NUMBERED = re.compile(r"checkpoint-(\d{1,12})\.json")
_FOLDER = re.compile(r"checkpoint-(\d{1,12})-[0-9a-f]{8}/.+", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint: its files by name, each with its object."""

    number: int
    created: str
    files: dict[str, Entry]


def manifest_name(number: int) -> str:
    """Return the name of a checkpoint's manifest."""
    return f"checkpoint-{number}.json"


def number_of(name: str) -> int | None:
    """Return the number in a manifest's name; None for another name."""
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match else None


def folder_number(name: str) -> int | None:
    """Return the number in the folder of a checkpoint's object; None for another name."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def encode_pointer(number: int) -> bytes:
    """Return the content of the pointer to the last complete checkpoint."""
    value = {"format": FORMAT, "number": number, "manifest": manifest_name(number)}
    return json.dumps(value).encode()


def encode(checkpoint: Checkpoint) -> bytes:
    """Encode a manifest."""
    files = [
        {
            "name": name,
            "object": file.name,
            "size_bytes": file.size_bytes,
            "sha256": file.sha256,
            "mode": file.mode,
        }
        for name, file in sorted(checkpoint.files.items())
    ]
    value = {"number": checkpoint.number, "created": checkpoint.created, "files": files}
    return json.dumps({"format": FORMAT, **value}, indent=1).encode()


def read_pointer(store: Store) -> int | None:
    """Return the number of the last complete checkpoint; None without one.

    Raises:
        DataError: The pointer is damaged.
    """
    if store.stat(POINTER) is None:
        return None
    number = _read(store, POINTER).get("number")
    if not isinstance(number, int):
        raise _damaged(store, POINTER, "it holds no number")
    return number


def read_checkpoint(store: Store, number: int) -> Checkpoint:
    """Read a checkpoint's manifest.

    Raises:
        DataError: The manifest is missing or damaged.
    """
    name = manifest_name(number)
    value = _read(store, name)
    try:
        files = dict(map(_file, value["files"]))
        return Checkpoint(number=number, created=str(value["created"]), files=files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(store, name, f"{type(error).__name__}: {error}") from error


def _file(row: Any) -> tuple[str, Entry]:
    name = row["name"]
    return name, listed_file(name, row["object"], row["size_bytes"], row["sha256"], row["mode"])


def _read(store: Store, name: str) -> dict[str, Any]:
    data = store.read(name)
    try:
        value = json.loads(data)
    except ValueError as error:
        raise _damaged(store, name, str(error)) from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise _damaged(store, name, f"its format is not `{FORMAT}`")
    return value


def _damaged(store: Store, name: str, why: str) -> DataError:
    return DataError(
        "the list of a checkpoint's files is damaged", where=store.where(name), why=why
    )
