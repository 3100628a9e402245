"""Pack torchmuster into one archive for hosts without it, named by its content.

The package is pure Python, so one archive serves every processor; a test checks that.
"""

import contextlib
import hashlib
import io
import os
import zipfile
from collections.abc import Iterable

from torchmuster.core import plugs, proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import muster_home

# Folders and files of the package that a node, host or pod needs, and why; the rest is not sent.
TRAVELS = plugs.table("travels")
_FIXED_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest in a zip; fixed for reproducible archives


def package_folder() -> str:
    """Return the folder of the running torchmuster."""
    return proc.PACKAGE_FOLDER


def is_sent(name: str) -> bool:
    """Return whether nodes need a file: any `__init__.py` or `plug.py`, or one of the table."""
    is_shared = "/" not in name or name.endswith(("/__init__.py", "/plug.py"))
    return is_shared or any(name == one or name.startswith(f"{one}/") for one in TRAVELS)


def package_files(package: str) -> list[tuple[str, bytes]]:
    """Return (relative name, content) of a package's files that nodes need, sorted."""
    found: list[tuple[str, bytes]] = []
    for folder, names, files in os.walk(package):
        names[:] = [name for name in names if name != "__pycache__"]
        for name in files:
            path = os.path.join(folder, name)
            relative = os.path.relpath(path, package)
            if is_sent(relative) and not name.endswith((".pyc", ".pyo")):
                with open(path, "rb") as file:
                    found.append((relative, file.read()))
    return sorted(found)


def content_hash(files: Iterable[tuple[str, bytes]]) -> str:
    """Return a hash of names, lengths and contents, as `launcher/node/remote/loader.py` does."""
    whole = hashlib.sha256()
    for name, data in sorted(files):
        whole.update(f"{name}\0{len(data)}\0".encode())
        whole.update(data)
    return whole.hexdigest()


def make_archive(files: Iterable[tuple[str, bytes]]) -> bytes:
    """Return a zip of the files; the same files give the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, data in files:
            info = zipfile.ZipInfo(name, _FIXED_DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, data)
    return buffer.getvalue()


def place_package(path: str) -> None:
    """Write this package's archive to `path`, as a hard link to the one in the cache or as a copy.

    Raises:
        OSError: The archive can't be written.
    """
    if os.path.exists(path):
        return
    cache = os.path.join(muster_home(), "cache")
    files = package_files(package_folder())
    sha = content_hash(files)
    data = cached_archive(cache, files, sha)
    try:
        os.link(os.path.join(cache, f"torchmuster-{sha}.zip"), path)
    except OSError:
        atomic.replace_file(path, data)


def cached_archive(cache: str, files: list[tuple[str, bytes]], sha: str) -> bytes:
    """Return the archive of the package; make it once per content and keep it in `cache`."""
    path = os.path.join(cache, f"torchmuster-{sha}.zip")
    try:
        with open(path, "rb") as file:
            data = file.read()
        if _holds(data, sha):
            return data
    except OSError:
        pass
    data = make_archive(files)
    with contextlib.suppress(OSError):  # without a cache it is made again next time
        os.makedirs(cache, mode=0o700, exist_ok=True)
        atomic.replace_file(path, data)
    return data


def _holds(data: bytes, sha: str) -> bool:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return content_hash((n, archive.read(n)) for n in archive.namelist()) == sha
    except (zipfile.BadZipFile, OSError, ValueError):
        return False
