"""What an interpreter has, found out without importing it: so its torch is reported a second earlier; and what an environment needs."""

import os
import re
import sys
from dataclasses import dataclass
from typing import Any

_VERSION = re.compile(r"^__version__ = '([^']+)'", re.MULTILINE)
_CUDA = re.compile(r"^cuda(?:: [^=]+)? = '([^']+)'", re.MULTILINE)
_HIP = re.compile(r"^hip(?:: [^=]+)? = '([^']+)'", re.MULTILINE)
_NCCL = re.compile(r"nvidia_nccl_cu\d+-([0-9.]+)\.dist-info$")
_MAX_BYTES = 1 << 16


def look_for_torch() -> dict[str, Any]:
    """Return the versions of Python, torch, its CUDA and NCCL as plain values.

    Takes about a millisecond: torch's own `version.py` is read as text.
    """
    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "machine": os.uname().machine,
        "torch": None,
        "is_known": True,
    }
    folder = _folder_of("torch")
    if folder is None:
        return found
    text = _read(os.path.join(folder, "version.py"))
    found["torch"] = _first(_VERSION, text)
    found["cuda"], found["hip"] = _first(_CUDA, text), _first(_HIP, text)
    found["is_known"] = found["torch"] is not None  # an editable build may have none
    found["nccl"] = _nccl(os.path.dirname(folder)) if found["cuda"] else None
    return found


def _folder_of(name: str) -> str | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            spec = find(name, None) if find is not None else None
        except Exception:  # noqa: BLE001 - a finder of another package may raise anything
            continue
        if spec is not None:
            return os.path.dirname(spec.origin) if spec.origin else None
    return None


def _nccl(packages: str) -> str | None:
    try:
        names = os.listdir(packages)
    except OSError:
        return None
    found = [match.group(1) for name in names if (match := _NCCL.match(name))]
    return found[0] if found else None


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match.group(1) if match else None


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read(_MAX_BYTES)
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentNeeds:
    """What a node must be for an environment.

    Attributes:
        sha: Of the list of its pieces: the name of the environment.
        machine: As of `uname -m`.
        glibc: The minor number of glibc 2 that its files need; 0 for none.
        python: Of the interpreter, `3.11`.
        base: The interpreter that has to be there; empty where it travels.
        size_bytes: Of the archive, which has `num_pieces`.
        unpacked_bytes: Of all its files, of which there are `num_files`.
        has_torch: It can be tried by importing torch.
    """

    sha: str
    machine: str
    glibc: int
    python: str
    base: str
    size_bytes: int
    num_pieces: int
    unpacked_bytes: int
    num_files: int
    has_torch: bool
