"""torchmuster as one archive, for hosts without it: named by its content, the same for every processor.

The package is pure Python, so it does not depend on this machine's processor; a test checks that.
"""

import contextlib
import hashlib
import io
import os
import zipfile
from collections.abc import Iterable

from torchmuster.files import atomic
from torchmuster.files.layout import muster_home

# Of the package what a node, host or pod needs, and why; the rest stays here. A name is a folder or a file.
TRAVELS = {
    "api": "scripts import the calls of `torchmuster` at their top, also those whose functions are workers",
    "cli/spelling.py": "near misses, for the calls",
    "data": "programs of tasks copy data sets and models",
    "diagnose/doctor": "the head compares what its nodes report before a start",
    "diagnose/explain": "owners in jobs and pods read the logs of a run that failed, before the logs are gone",
    "diagnose/facts": "each node looks at its GPUs, network and memory",
    "diagnose/finding.py": "what those three find",
    "engines": "owners in jobs and pods ask their scheduler",
    "files": "everything keeps its files by it",
    "head": "runs on the first node",
    "model": "values that all share",
    "net": "how nodes talk",
    "node": "runs on every node",
    "owner": "owns runs in jobs and pods",
    "programs": "the programs that muster starts on nodes",
    "spec/explain.py": "a task of a workflow that is a training plans it on its node; as the next ones",
    "spec/launch.py": "the same",
    "spec/metadata.py": "what a program that copies data sets says of them",
    "spec/problems.py": "as spec/explain.py",
    "spec/scalars.py": "the same",
    "spec/sites": "the same; where credentials of data sets stand",
    "spec/source.py": "the same",
    "spec/staging.py": "the same",
    "spec/sweep_plan.py": "a sweep's owner in a job or in pods",
    "spec/units.py": "times and sizes in options of programs",
    "spec/values.py": "as spec/explain.py",
    "train": "the library in the script",
    "ui/status_line.py": "the calls follow runs",
    "ui/top/ranks.py": "the calls follow runs",
    "ui/top/run_lines.py": "the calls follow runs",
    "ui/top/words.py": "the calls follow runs",
}
_THE_SAME_DATE = (1980, 1, 1, 0, 0, 0)  # the least that a zip can hold: the content alone names it


def package_folder() -> str:
    """Return the folder of the running torchmuster."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def travels(name: str) -> bool:
    """Return whether nodes need a file of the package; what all of its folders need is in their `__init__.py`."""
    is_shared = "/" not in name or name.endswith("/__init__.py")
    return is_shared or any(name == one or name.startswith(f"{one}/") for one in TRAVELS)


def package_files(package: str) -> list[tuple[str, bytes]]:
    """Return (relative name, content) of the files of a package that nodes need, sorted."""
    found: list[tuple[str, bytes]] = []
    for folder, names, files in os.walk(package):
        names[:] = [name for name in names if name != "__pycache__"]
        for name in files:
            path = os.path.join(folder, name)
            relative = os.path.relpath(path, package)
            if travels(relative) and not name.endswith((".pyc", ".pyo")):
                with open(path, "rb") as file:
                    found.append((relative, file.read()))
    return sorted(found)


def content_hash(files: Iterable[tuple[str, bytes]]) -> str:
    """Return the hash of files: names, lengths and contents. `node/remote/loader.py` counts the same."""
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
            info = zipfile.ZipInfo(name, _THE_SAME_DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, data)
    return buffer.getvalue()


def place_package(path: str) -> None:
    """Write the archive of this package to `path`: a hard link to the one in the cache, or a copy.

    Raises:
        OSError: It can't be written.
    """
    if os.path.exists(path):
        return
    cache = os.path.join(muster_home(), "cache")
    files = package_files(package_folder())
    sha = content_hash(files)
    data = travelling_package(cache, files, sha)
    try:
        os.link(os.path.join(cache, f"torchmuster-{sha}.zip"), path)
    except OSError:
        with open(path, "wb") as file:
            file.write(data)


def travelling_package(cache: str, files: list[tuple[str, bytes]], sha: str) -> bytes:
    """Return the archive of the package, made once for each content and kept in `cache`."""
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
