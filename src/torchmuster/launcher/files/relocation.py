"""Where an environment names its own place, and writing the new one there: scripts and settings of any, binaries of conda's.

conda builds packages for a prefix of 255 letters, and writes the real one over it when it installs: into text as it is, into binaries with as many
NULs behind the string as it is shorter. It notes both kinds in `conda-meta`, with the long prefix, so how much room a string has is known.
"""

import glob
import json
import os
import re
from collections.abc import Mapping
from typing import Any

_MAX_RECORD_BYTES = 256 << 20


def may_name_places(name: str) -> bool:
    """Say whether a file of an environment may hold the path of its folder, as scripts and settings do."""
    if os.path.dirname(name) == "bin" or name == "pyvenv.cfg":
        return True
    return name.endswith(".pth") or os.path.basename(name).startswith("__editable__")


def conda_records(prefix: str) -> tuple[frozenset[str], dict[str, int]]:
    """Return the text files of a conda environment that hold its prefix, and its binaries with the length of the string that was made for it."""
    texts, binaries = set(), {}
    for path in glob.glob(glob.escape(prefix) + "/conda-meta/*.json"):
        try:
            with open(path, "rb") as file:
                record = json.loads(file.read(_MAX_RECORD_BYTES))
            entries = record["paths_data"]["paths"]
            for entry in entries:
                placeholder = entry.get("prefix_placeholder")
                if not placeholder:
                    continue
                if entry.get("file_mode") == "binary":
                    binaries[str(entry["_path"])] = len(os.fsencode(placeholder))
                else:
                    texts.add(str(entry["_path"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # a record that conda can't read either
    return frozenset(texts), binaries


def relocate(root: str, place: str, noted: Mapping[str, Any]) -> None:
    """Write the place where it will be into what was unpacked below `root`.

    Args:
        root: Where it is now.
        place: Where it will be.
        noted: By whoever packed it: `links` out of it, `texts`, `binaries`, and `moves`, the folders that it was made of.

    Raises:
        ValueError: What is noted is damaged, or a binary has no room for the place.
        OSError: A file can't be written.
    """
    # The longest first: an environment may lie in the folder of an editable install.
    moves = sorted(noted["moves"].items(), key=lambda move: -len(move[0]))
    new = {os.fsencode(old): os.fsencode(os.path.join(place, name)) for old, name in moves}
    # A longer name that begins so is another folder.
    pattern = re.compile(b"(" + b"|".join(map(re.escape, new)) + rb")(?![A-Za-z0-9_.-])")
    for name in noted["texts"]:
        path = _file(root, name)
        with open(path, "rb") as file:
            data = file.read()
        if b"\0" not in data:
            _write(path, data, pattern.sub(lambda found: new[found[1]], data))
    prefix = next((os.fsencode(old) for old, name in moves if name == "env"), b"")
    there = os.fsencode(os.path.join(place, "env"))
    for name, room in noted["binaries"].items():
        path = _file(root, name)
        with open(path, "rb") as file:
            data = file.read()
        _write(path, data, in_binary(data, prefix, there, int(room), name))
    for name, target in noted["links"].items():
        os.symlink(target, _file(root, name))


def _file(root: str, name: str) -> str:
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name!r} leaves its folder")
    path = os.path.join(root, name)
    inside = os.path.realpath(root)
    if os.path.commonpath([os.path.realpath(os.path.dirname(path)), inside]) != inside:
        raise ValueError(f"{name!r} leaves its folder through a link")
    return path


def _write(path: str, before: bytes, after: bytes) -> None:
    if after != before:
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "wb") as file:
            file.write(after)


def in_binary(data: bytes, old: bytes, new: bytes, room: int, name: str) -> bytes:
    """Return a binary with another prefix, of the same length: each string goes on to be ended by NULs.

    Args:
        data: The binary.
        old: The prefix that it holds.
        new: The one that it shall hold.
        room: How long the prefix was that it was built for.
        name: Of the file, for errors.

    Raises:
        ValueError: The new prefix is longer than that, or the file has not the room that conda leaves.
    """
    if len(new) > room:
        raise ValueError(f"{os.fsdecode(new)} is {len(new)} bytes long, {name} has room for {room}")
    # Strings with several places in them, such as RPATHs, end behind the last one.
    string = re.compile(re.escape(old) + rb"[^\0]*\0+")

    def replaced(found: re.Match[bytes]) -> bytes:
        whole = found[0]
        text = whole.rstrip(b"\0")
        count = text.count(old)
        if len(whole) - len(text) < count * (room - len(old)) + 1:
            raise ValueError(f"{name} has another string than conda has written there")
        after = text.replace(old, new)
        return after.ljust(len(whole), b"\0")

    return string.sub(replaced, data)
