"""The list of a dataset version's files: one JSON file, the last that an upload writes."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchmuster.data.faults import DataError
from torchmuster.data.names import unsafe_reason

FORMAT = "muster-dataset-1"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFile:
    """A file of a version; its bytes are in the object that its SHA-256 names."""

    path: str
    sha256: str
    size_bytes: int
    mode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetManifest:
    """A version of a dataset.

    Attributes:
        name: `[bucket/]NAME`.
        version: Counted from 1.
        created: UTC, ISO 8601.
        run_id: The run that made it, if one did.
        writer: Random: tells the manifests of two writers apart that are equal otherwise.
        files: Sorted by path.
        metadata: What the user noted about this version.
    """

    name: str
    version: int
    created: str
    run_id: str | None = None
    writer: str
    files: tuple[DatasetFile, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def checksum(self) -> str:
        """SHA-256 of all paths, modes and contents: equal for equal files, whatever the version."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.sha256} {file.mode:o} {file.path}\0".encode())
        return digest.hexdigest()


def encode(manifest: DatasetManifest) -> bytes:
    """Return a manifest's bytes; they end in a checksum of their own."""
    body = {"format": FORMAT, **asdict(manifest), "checksum": manifest.checksum}
    return json.dumps(body, indent=1, sort_keys=True).encode()


def decode(data: bytes, where: str) -> DatasetManifest:
    """Return the manifest in some bytes.

    Raises:
        DataError: The bytes are damaged; it says how.
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
            files=tuple(_file(one) for one in value["files"]),
            metadata=dict(value["metadata"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(where, f"{type(error).__name__}: {error}") from error
    if value.get("checksum") != manifest.checksum:
        raise _damaged(where, "its checksum does not fit what it lists")
    return manifest


def _file(value: Any) -> DatasetFile:
    file = DatasetFile(
        path=value["path"],
        sha256=value["sha256"],
        size_bytes=int(value["size_bytes"]),
        mode=int(value["mode"]),
    )
    if not _SHA256.fullmatch(file.sha256) or file.size_bytes < 0:
        raise ValueError(f"`{file.path}` has no checksum or size")
    if reason := unsafe_reason(file.path):
        raise ValueError(f"`{file.path}`: {reason}")
    return file


def _damaged(where: str, why: str) -> DataError:
    fix = "take another version; upload this one again"
    return DataError("the list of a dataset's files is damaged", where=where, why=why, fix=fix)
