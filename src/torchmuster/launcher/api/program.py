"""The very torchmuster that runs here as a command, and those commands that Python waits for until they have said their answer."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence

from torchmuster.core import proc
from torchmuster.launcher.api.failures import NotLaunchedError, read_errors

# The very torchmuster that runs here; nothing else of this process is inherited.
_PROGRAM = """\
import sys
sys.path.insert(0, {folder!r})
import torchmuster
del sys.path[0]
from torchmuster.__main__ import main
sys.exit(main())
"""


def command(*words: str) -> list[str]:
    """Return the command line of the very torchmuster that runs here."""
    package = os.path.dirname(proc.PACKAGE_FOLDER)
    return [sys.executable, "-P", "-c", _PROGRAM.format(folder=package), *words]


def start_command(name: str, words: Sequence[str]) -> str:
    """Run a command that leaves its run in the background; return the run's id, which it prints.

    Raises:
        NotLaunchedError: It has ended with errors.
    """
    argv = command(name, *words)
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
        child = proc.start(argv, stdout=said.fileno(), stderr=errors.fileno())
        try:
            while (status := child.wait(3600.0)) is None:
                continue
        except BaseException:  # interrupted: who has asked does not want it any more
            child.send_signal(15)
            child.wait(10.0)
            raise
        said.seek(0)
        errors.seek(0)
        lines = said.read().decode(errors="replace").split()
        text = errors.read().decode(errors="replace")
    if status != 0 or not lines:
        raise _as_error(name, text, status)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)  # what the command notes, e.g. of a disk that is nearly full
    return lines[-1]


def _as_error(command: str, text: str, status: int) -> NotLaunchedError:
    found = read_errors(text)
    if not found:
        what = f"`muster {command}` ended with {status} and started nothing"
        return NotLaunchedError(what, why=text.strip() or None)
    first, *others = found
    first.others = tuple(others)
    return first
