"""The manifest of a dataset version: one JSON file, which an upload writes last."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchmuster.workflow.data.faults import DataError
from torchmuster.workflow.data.names import unsafe_reason
from torchmuster.workflow.data.store import Entry

FORMAT = "muster-dataset-1"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def object_name(sha256: str) -> str:
    """Return the name of the object that stores a content."""
    return f"objects/{sha256[:2]}/{sha256}"


def stored_file(source: str, size_bytes: int, sha256: str, mode: int) -> Entry:
    """Return the entry of a file whose content is the object `source`."""
    return Entry(name=source, size_bytes=size_bytes, tag=sha256, sha256=sha256, mode=mode)


def listed_file(name: str, source: str, size_bytes: Any, sha256: Any, mode: Any) -> Entry:
    """Return a checked file entry, from the values in a manifest.

    Raises:
        ValueError: A name is unsafe, or the checksum, size or mode is invalid.
    """
    is_whole = type(size_bytes) is int and size_bytes >= 0 and type(mode) is int
    if not is_whole or not _SHA256.fullmatch(sha256):
        raise ValueError(f"`{name}` has no checksum, size or mode")
    if reason := unsafe_reason(name) or unsafe_reason(source):
        raise ValueError(f"`{name}`: {reason}")
    return stored_file(source, size_bytes, sha256, mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetManifest:
    """A version of a dataset.

    Attributes:
        name: `[bucket/]NAME`.
        version: The number, counted from 1.
        created: The time, UTC in ISO 8601.
        run_id: The run that made it, if any.
        writer: A random text that distinguishes equal manifests of two writers.
        files: The files by path, sorted, each with the object that has its content.
        metadata: The user's metadata of this version.
    """

    name: str
    version: int
    created: str
    run_id: str | None = None
    writer: str
    files: Mapping[str, Entry]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Return the total size of the files."""
        return sum(file.size_bytes for file in self.files.values())

    @property
    def checksum(self) -> str:
        """Return the SHA-256 of all paths, modes and contents, whatever the version."""
        digest = hashlib.sha256()
        for path, file in self.files.items():
            digest.update(f"{file.sha256} {file.mode or 0:o} {path}\0".encode())
        return digest.hexdigest()

    def plain(self) -> dict[str, Any]:
        """Return the manifest as JSON values."""
        files = [
            {"path": path, "sha256": f.sha256, "size_bytes": f.size_bytes, "mode": f.mode}
            for path, f in self.files.items()
        ]
        names = ("name", "version", "created", "run_id", "writer")
        first = {name: getattr(self, name) for name in names}
        return {**first, "files": files, "metadata": dict(self.metadata)}


def encode(manifest: DatasetManifest) -> bytes:
    """Encode a manifest, with the checksum of its files."""
    body = {"format": FORMAT, **manifest.plain(), "checksum": manifest.checksum}
    return json.dumps(body, indent=1, sort_keys=True).encode()


def decode(data: bytes, where: str) -> DatasetManifest:
    """Decode a manifest.

    Raises:
        DataError: The manifest is damaged.
    """
    try:
        value = json.loads(data)
        if value["format"] != FORMAT:
            raise _damaged(where, f"its format is {value['format']!r}, not `{FORMAT}`")
        manifest = DatasetManifest(
            name=str(value["name"]),
            version=int(value["version"]),
            created=str(value["created"]),
            run_id=value["run_id"],
            writer=str(value["writer"]),
            files=dict(map(_file, value["files"])),
            metadata=dict(value["metadata"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(where, f"{type(error).__name__}: {error}") from error
    if value.get("checksum") != manifest.checksum:
        raise _damaged(where, "its checksum does not match its contents")
    return manifest


def _file(row: Any) -> tuple[str, Entry]:
    path, sha256 = row["path"], row["sha256"]
    return path, listed_file(path, object_name(sha256), row["size_bytes"], sha256, row["mode"])


def _damaged(where: str, why: str) -> DataError:
    fix = "use another version, or upload this one again"
    return DataError("the list of a dataset's files is damaged", where=where, why=why, fix=fix)
