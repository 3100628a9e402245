"""Record who requests a run and with which code, in a thread: git may take seconds on a slow disk.

The thread writes `origin.json` once. A start does not wait for it; a run without it only lacks a
part of its report.
"""

import contextlib
import getpass
import glob
import os
import platform
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torchmuster
from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.plan import Program, ScriptKind
from torchmuster.core.model.text import hide_secrets
from torchmuster.errors import MusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeVersion:
    """The state of a git work tree.

    Attributes:
        root: Its folder.
        commit: The checked-out commit; empty before the first commit.
        branch: The checked-out branch; empty without one.
        changed: The first tracked files that differ from the commit.
        num_changed: Number of such files.
        untracked: The first files that are neither tracked nor ignored; their content is not
            recorded.
        num_untracked: Number of such files.
        difference: The difference between commit and files, as from `git diff`, without files and
            values that look secret.
        left_out: Why `difference` is incomplete; empty if it is complete.
    """

    root: str
    commit: str = ""
    branch: str = ""
    changed: tuple[str, ...] = ()
    num_changed: int = 0
    untracked: tuple[str, ...] = ()
    num_untracked: int = 0
    difference: str = ""
    left_out: str = ""

    @property
    def is_clean(self) -> bool:
        """Say whether the files are those of the commit; the report's page asks."""
        return bool(self.commit) and not self.num_changed and not self.num_untracked


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The content of `origin.json`: who requested a run, from where, and with which code.

    Attributes:
        user: Name of the account.
        host: Where it was requested.
        torchmuster: Version of the client.
        python: Version of the client's interpreter.
        code: Version of the code; None if the script is in no git work tree.
        why_no_code: Why the version is unknown; empty if it is known.
        packages: Packages of the program's interpreter on the client's machine, as `numpy==2.4.6`;
            empty if unknown here.
    """

    user: str
    host: str
    torchmuster: str
    python: str
    code: CodeVersion | None = None
    why_no_code: str = ""
    packages: tuple[str, ...] = ()


MAX_DIFFERENCE_BYTES = 256 << 10
_MAX_LINES = 20_000  # limit before asking: git gives all or nothing
_MAX_FILES = 100
_LIMIT_S = 5.0  # for all questions: a client that only submits waits for the note
# Ignore those settings of a repository that would run a command or take a lock.
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false")
_INSTALLED = (".dist-info", ".egg-info")
_MAX_PACKAGES = 2000
_SECRET_FILES = (
    "*.env",
    "*.env.*",
    "*.pem",
    "*.key",
    "*id_rsa*",
    "*credentials*",
    "*secret*",
    "*.netrc",
)

Ask = Callable[..., bytes | None]
_writing = threading.Lock()


def block_notes() -> None:
    """Block further notes to the run directories of this process, which is about to end."""
    _writing.acquire()


def note_origin(run_dir: RunDir, program: Program | None) -> None:
    """Record in a thread who requests the run and with which code.

    Args:
        run_dir: Run directory.
        program: What will run; None for a workflow, whose tasks differ.
    """
    folder = folder_of(program) if program is not None else os.getcwd()
    python = program.python[:1] if program is not None else ()
    thread = threading.Thread(target=_note, args=(run_dir, folder, *python), name="origin")
    thread.start()


def folder_of(program: Program) -> str:
    """Return the folder whose version counts: that of the script, else the working directory."""
    if program.kind is not ScriptKind.FILE:
        return program.cwd
    return os.path.dirname(os.path.join(program.cwd, program.target)) or program.cwd


def _note(run_dir: RunDir, folder: str, python: str = "") -> None:
    with contextlib.suppress(OSError, MusterError):  # the run directory may be gone by now
        found = codec.to_plain(find_origin(folder, python))
        with _writing:
            atomic.write_json(run_dir.origin, found)


def find_origin(folder: str, python: str = "") -> Origin:
    """Return the user, the version of the code in a folder, and an interpreter's packages."""
    code, why = find_code_version(folder)
    return Origin(
        user=_user(),
        host=socket.gethostname(),
        torchmuster=torchmuster.__version__,
        python=platform.python_version(),
        code=code,
        why_no_code=why,
        packages=installed_for(python),
    )


def installed_for(python: str) -> tuple[str, ...]:
    """Return an interpreter's distributions by their folder names, as `numpy==2.4.6`, sorted.

    It reads the folders of a virtual environment or an installation and, for muster's own
    interpreter, `sys.path`; it starts nothing. Empty if the interpreter is not on this machine.
    """
    path = shutil.which(python) if python else None
    if path is None:
        return ()
    root = os.path.dirname(os.path.dirname(os.path.abspath(path)))
    folders = glob.glob(os.path.join(glob.escape(root), "lib", "python3*", "*-packages"))
    if os.path.abspath(path) == os.path.abspath(sys.executable):
        folders += sys.path
    found: dict[str, str] = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            names = [name for name in os.listdir(folder) if name.endswith(_INSTALLED)]
            found |= {name.lower(): _distribution(name) for name in names}
    return tuple(sorted(set(found.values())))[:_MAX_PACKAGES]


def _distribution(folder: str) -> str:
    """Return `numpy==2.4.6` for `numpy-2.4.6.dist-info`."""
    name, _, version = folder.rpartition(".")[0].partition("-")
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version.split('-py')[0]}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an account without a name, as in many containers
        return str(os.getuid())


def find_code_version(folder: str) -> tuple[CodeVersion | None, str]:
    """Return the version of the git work tree around a folder, or None and the reason."""
    try:
        ask = _asker(folder, time.monotonic() + _LIMIT_S)
        top = ask("rev-parse", "--show-toplevel")
        if top is None:
            return None, "the script is in no git work tree"
        root = os.fsdecode(top.rstrip(b"\n"))
        return _version_of(root, ask), ""
    except MusterError as error:
        return None, f"git can't be asked: {error.why or error.what}"


def _version_of(root: str, ask: Ask) -> CodeVersion:
    commit = _word(ask("rev-parse", "--verify", "--quiet", "HEAD"))
    branch = _word(ask("symbolic-ref", "--quiet", "--short", "HEAD"))
    changed, untracked, why = _changes(ask)
    difference = ""
    if commit and changed:
        difference, why = _difference(ask, commit)
    elif changed:
        why = "nothing was ever committed"
    return CodeVersion(
        root=root,
        commit=commit,
        branch=branch,
        changed=tuple(changed[:_MAX_FILES]),
        num_changed=len(changed),
        untracked=tuple(untracked[:_MAX_FILES]),
        num_untracked=len(untracked),
        difference=difference,
        left_out=why,
    )


def _changes(ask: Ask) -> tuple[list[str], list[str], str]:
    """Return changed files, untracked files, and why they are unknown."""
    said = ask("status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=normal")
    if said is None:
        return [], [], f"git did not say within {_LIMIT_S:g} s what has changed"
    changed: list[str] = []
    untracked: list[str] = []
    for entry in said.split(b"\0"):
        state, name = entry[:2], entry[3:].decode(errors="replace")
        if name:
            (untracked if state == b"??" else changed).append(name)
    return changed, untracked, ""


def _difference(ask: Ask, commit: str) -> tuple[str, str]:
    files = [":/", *(f":(top,exclude,icase,glob)**/{pattern}" for pattern in _SECRET_FILES)]
    plain = (
        "diff",
        "--no-ext-diff",
        "--no-textconv",
        "--no-color",
        "--no-renames",
        "--submodule=short",
    )
    counts = ask(*plain, "--numstat", "-z", commit, "--", *files)
    if counts is None:
        return "", f"git did not compare the files within {_LIMIT_S:g} s"
    num_lines = sum(_lines(row) for row in counts.split(b"\0"))
    if num_lines > _MAX_LINES:
        return "", f"{num_lines} lines differ, which is more than {_MAX_LINES}"
    said = ask(*plain, "--patch", commit, "--", *files)
    if said is None:
        return "", f"git did not compare the files within {_LIMIT_S:g} s"
    text = hide_secrets(said[: 4 * MAX_DIFFERENCE_BYTES].decode(errors="replace"))
    cut = text.encode()[:MAX_DIFFERENCE_BYTES].decode(errors="ignore")
    is_cut = len(cut) < len(text) or len(said) > 4 * MAX_DIFFERENCE_BYTES
    return cut, f"it is cut after {MAX_DIFFERENCE_BYTES >> 10} KiB" if is_cut else ""


def _lines(row: bytes) -> int:
    """Return the number of changed lines in a row of `--numstat`; a binary file has none."""
    return sum(int(word) for word in row.split(b"\t")[:2] if word.isdigit())


def _word(said: bytes | None) -> str:
    return said.decode(errors="replace").strip() if said is not None else ""


def _asker(folder: str, ends_at: float) -> Ask:
    """Return a function that asks git; it returns None if git fails or the shared time is up.

    The function raises MusterError if there is no git.
    """

    def ask(*words: str) -> bytes | None:
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            return None
        answer = proc.ask_spared([*_GIT, "-C", folder, *words], left_s)
        return answer.stdout if answer.status == 0 else None

    return ask
