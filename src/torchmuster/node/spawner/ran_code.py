"""Which code a worker has run: checksums of its script and of the project's modules that it has imported.

Read when the script has ended. A file that has changed since the worker began may not be what was imported: it is marked.
Imported in the job's interpreter.
"""

import os
import sys
import time
from typing import Any

from torchmuster.model.failure import RanCode, RanFile

_MOST_FILES = 200
_MOST_BYTES = 8 << 20
_MOST_PATH = 300
_NOT_OF_A_PROJECT = ("/site-packages/", "/dist-packages/")
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "")


class CodeNote:
    """Notes what rank 0 runs.

    Args:
        folder: What stands in front of `sys.path`; None for nothing.
    """

    def __init__(self, folder: str | None) -> None:
        self._cwd = os.getcwd()
        roots = {os.path.realpath(one) for one in (self._cwd, folder) if one}
        self._roots = tuple(os.path.join(root, "") for root in roots if root != "/")
        self._is_wanted = os.environ.get("RANK") == "0"
        self._since = time.time()
        self._script: tuple[str, bytes] | None = None

    def take_script(self, path: str, text: bytes) -> None:
        """Take the very bytes that are run."""
        self._script = os.path.realpath(path), text

    def read(self) -> RanCode | None:
        """Return what has run; None where that is not this worker's business, or can't be read."""
        if not self._is_wanted:
            return None
        try:
            return self._read()
        except Exception:  # noqa: BLE001 - a worker never fails because telling fails
            return None

    def _read(self) -> RanCode:
        from hashlib import sha256  # not before the script: it may have a module of this name

        found: list[RanFile] = []
        if self._script is not None:
            path, text = self._script
            found.append(RanFile(path=self._short(path), sha256=sha256(text).hexdigest()))
        paths = self._project_files()
        for path in paths[: _MOST_FILES - len(found)]:
            try:
                status = os.stat(path)
                with open(path, "rb") as file:
                    text = file.read(_MOST_BYTES)
            except OSError:
                continue
            changed = max(status.st_ctime, status.st_mtime) > self._since
            checksum = sha256(text).hexdigest()
            found.append(RanFile(path=self._short(path), sha256=checksum, changed=changed))
        num_all = len(paths) + (self._script is not None)
        return RanCode(files=tuple(found), num_left_out=num_all - len(found))

    def _project_files(self) -> list[str]:
        """Return the files of the project that modules came from, without the script."""
        found: dict[str, None] = {}
        for module in list(sys.modules.values()):
            name: Any = getattr(module, "__file__", None)
            if not isinstance(name, str) or not os.path.isabs(name):  # as of some compiled modules
                continue
            path = os.path.realpath(name)
            is_own = path.startswith(self._roots) and not path.startswith(_OURS)
            if is_own and not any(part in path for part in _NOT_OF_A_PROJECT):
                found[path] = None
        if self._script is not None:
            found.pop(self._script[0], None)
        return sorted(found)

    def _short(self, path: str) -> str:
        root = os.path.join(os.path.realpath(self._cwd), "")
        return path.removeprefix(root)[-_MOST_PATH:]
