"""Error numbers of the kernel: they say what, the path says where."""

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torchmuster.diagnose.explain.case import ANYWHERE, Case
from torchmuster.diagnose.explain.events import LineRole, LogEvent, LogFinding
from torchmuster.diagnose.explain.reading.sentences import SENTENCES
from torchmuster.diagnose.explain.rules.ranks import raised_by
from torchmuster.diagnose.explain.rules.rows import (
    HIGH,
    LOW,
    MEDIUM,
    Row,
    Weight,
    at,
    found_by,
    words_of,
)

SMALL_SHM_HINT = "--shm-size=8g or --ipc=host for the container, or fewer loader workers"

SHM_IN = {
    "kubernetes": "give the pod a /dev/shm of its own: a volume with emptyDir: {{medium: Memory, sizeLimit: 8Gi}}, mounted at /dev/shm",
    "container": "docker run --shm-size=8g, or --ipc=host (apptainer takes the host's /dev/shm); or fewer loader workers",
}
# For a cache of a library, of which the variable is known that says where it lies.
_CACHE_ELSEWHERE = (
    "put that cache elsewhere: export {cache_variable}=/path/with/room/and/rights in the job"
)
_PAST_TMP = "export TMPDIR=/path/with/room in the job"


def _row(cause: str, error: str, hint: str, confirm: str | None = None, **more: Any) -> Row:
    more = {"confidence": MEDIUM, "weight": Weight.PROGRAM + 2, "num_lines": 1, **more}
    return Row(cause=cause, error=error + "{of_path}", hint=hint, confirm=confirm, **more)


_ROWS = {
    errno.ENOSPC: _row(
        "disk-full",
        "the disk is full",
        "make room, or write elsewhere",
        hint_in={
            ANYWHERE: (
                _CACHE_ELSEWHERE,
                f"{{on_tmp}} of that node is full: {_PAST_TMP}, or leave the node out (Slurm: --exclude), and tell its owner",
            )
        },
        confirm="df -h {folder}; df -i {folder}",
        confidence=HIGH,
        weight=Weight.PROVED,
    ),
    errno.EDQUOT: _row(
        "quota",
        "the quota of the user or project is used up",
        "delete what is not needed, or write to scratch",
        hint_in={ANYWHERE: _CACHE_ELSEWHERE},
        confirm="quota -s; lfs quota -h -u $USER {folder}",
        confidence=HIGH,
        weight=Weight.PROVED,
    ),
    errno.ESTALE: _row(
        "stale-file",
        "a file on a network file system was replaced by another client",
        "write to a new name and rename; keep caches of each node local",
        "stat {folder}   on every node",
        confidence=HIGH,
    ),
    errno.EMFILE: _row(
        "open-files",
        "the limit of open files is reached",
        "ulimit -n 65536 in the job, or torch.multiprocessing.set_sharing_strategy('file_system')",
        hint_in={
            "container": "docker run --ulimit nofile=65536:65536, or torch.multiprocessing.set_sharing_strategy('file_system')",
            ANYWHERE: "the limit is {open_files}: ulimit -n 65536 in the job, or torch.multiprocessing.set_sharing_strategy('file_system')",
        },
        confirm="ulimit -n",
        confidence=HIGH,
    ),
    errno.EIO: _row(
        "disk-error",
        "the storage gave an input/output error",
        "the site has to look at the file system; copy the data to the node first",
        "dmesg | tail",
    ),
    errno.EROFS: _row(
        "read-only",
        "the file system is read-only",
        "write to a folder that may be written",
        hint_in={
            ANYWHERE: (
                _CACHE_ELSEWHERE,
                (
                    f"{{on_tmp}} of that node was made read-only, mostly after an error of its disk: {_PAST_TMP}, or leave the node out,"
                    " and tell the site"
                ),
            )
        },
        confirm="findmnt -T {folder}",
    ),
    errno.EACCES: _row(
        "permission",
        "a file may not be read or written",
        "chmod, or another path; check the user in the container",
        hint_in={ANYWHERE: _CACHE_ELSEWHERE},
        confirm="ls -ld {folder}; id",
    ),
    errno.ENOENT: _row(
        "file-missing",
        "a file is not there",
        "check the path on the node that failed: not all file systems are shared",
        hint_in={
            ANYWHERE: (
                (
                    "make the folder first: os.makedirs('{folder_to_make}', exist_ok=True) before the line that writes, or"
                    " `mkdir -p {folder_to_make}` in the job"
                ),
                "Python opens ~ as it is written: os.path.expanduser('{home_path}'), or the full path",
                "if {meant_file} is meant, which the log names too, correct the path; else see on which node it lies",
                (
                    "the path {relative_path} begins at the folder in which the job runs: give the full path, or cd there first; if an"
                    " earlier step should have made it, see whether that one ended well"
                ),
            )
        },
        confirm="ls -l {folder}   on every node",
    ),
    errno.EISDIR: _row(
        "bad-setting",
        "a folder is given where a file is needed",
        "give the file's own path: the argument or variable that should end with its name is a folder, or its last part is empty",
        confirm="ls -l {path}",
    ),
    errno.ENOMEM: _row(
        "memory",
        "memory could not be allocated",
        "ask for more memory, or use fewer loader workers",
        "free -g; cat /sys/fs/cgroup/memory.max",
    ),
    errno.EEXIST: _row(
        "race",
        "a file or folder exists already: several ranks make it at once, or an earlier run did",
        "os.makedirs(path, exist_ok=True), or let only rank 0 make it and the others wait at a barrier",
        "ls -l {folder}",
    ),
    errno.EAGAIN: _row(
        "system-error",
        "no more processes or threads may be started",
        "OMP_NUM_THREADS=1 and fewer loader workers; a higher `ulimit -u`, or pids limit of the container",
        "ulimit -u; cat /sys/fs/cgroup/pids.max",
    ),
    errno.ENOTCONN: _row(
        "mount-lost",
        "a mounted file system has lost its server",
        "the site has to mount it again; leave the node out until then",
        "findmnt -T {folder}",
    ),
    errno.ECONNREFUSED: _row(
        "connection-refused",
        "a connection was refused",
        "see what should listen there",
    ),
    errno.ENAMETOOLONG: _row(
        "name-too-long",
        "a path is too long",
        "set TMPDIR to a shorter folder",
        "echo ${{#TMPDIR}}",
    ),
}
_ROWS[errno.EPERM] = _ROWS[errno.EACCES]
_ROWS[errno.ENFILE] = _ROWS[errno.EMFILE]
_ROWS[errno.ESHUTDOWN] = _ROWS[errno.EHOSTDOWN] = _ROWS[errno.ENOTCONN]
_OTHER = _row(
    "system-error",
    "the kernel answered {name}: {meaning}",
    "see what the path is, who else uses it, and on which file system it is",
)
_SHM_FULL = replace(
    _ROWS[errno.ENOSPC],
    cause="small-dev-shm",
    error="/dev/shm is full{of_path}",
    hint=SMALL_SHM_HINT,
    hint_in=SHM_IN,
)
_NO_NAME = _row(
    "bad-setting",
    "a file without a name is opened: its path is an empty text",
    "give the path: the argument or variable that should hold it is empty or was not set",
)
_IS_EMPTY = re.compile(r"\[Errno 2\] [^:]+: ''$")
_IN_SHM = re.compile(r"/dev/shm|</?torch_\d|shared memory")
_PATH = re.compile(r"'(/[^']+)'")
# Of a copy, Python names both files; no room, no rights to write: that is said of the second.
_COPIED_TO = re.compile(r"\[Errno \d+\] [^:]+: '[^']*' -> '(?P<path>[^']+)'")
_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def system_errors(case: Case) -> Iterator[LogFinding]:
    """The first line of each error number; what ended a process says more than what it logged before."""
    seen: set[int] = set()
    for event in sorted(case.of("errno"), key=lambda event: not event.get("uncaught")):
        number = number_of(event)
        if number and number not in seen and event.role is LineRole.CAUSE:
            seen.add(number)
            yield _finding(case, event, number)


_FAILED_TO_READ = re.compile(r"(\S+): Input/output error")


def broken_disk(case: Case) -> Iterator[LogFinding]:
    """Several programs of a node can't read or write: then all else that fails there is a consequence."""
    found = [e for e in case.of("errno") if number_of(e) == errno.EIO]
    programs = {name for e in found for name in _FAILED_TO_READ.findall(e.line.text)}
    if len(programs) > 1:
        names = {"of_path": f", for {len(programs)} programs"}
        yield found_by(case, _ROWS[errno.EIO], found, names, weight=Weight.SCHEDULER - 1)


def _finding(case: Case, event: LogEvent, number: int) -> LogFinding:
    copied = _COPIED_TO.search(words_of(event)) if number in _OF_WRITING else None
    if copied is not None:
        event = replace(event, fields={**event.fields, "path": copied["path"]})
    path = event.get("path") or next(iter(_PATH.findall(event.line.text)), "")
    row = _ROWS.get(number, _OTHER)
    if number == errno.ENOSPC and (_IN_SHM.search(event.line.text) or "torch_" in path):
        row = _SHM_FULL
    if number == errno.ENOENT and _IS_EMPTY.search(words_of(event)):
        row = _NO_NAME
    names = {
        "of_path": f": {path or _own_words(event)}" if path or _own_words(event) else "",
        "folder": os.path.dirname(path) or "PATH",
        "path": path or "PATH",
        "name": errno.errorcode.get(number, str(number)),
        "meaning": os.strerror(number).lower(),
    }
    raised = bool(event.get("type"))
    by = raised_by(case, event, case.of("errno"))
    return found_by(
        case,
        row,
        [event],
        names,
        confidence=row.confidence if raised or row.confidence is HIGH else LOW,
        weight=row.weight if raised or row.weight == Weight.PROVED else Weight.COLLECTIVE - 1,
        at=event.get("where") or at(event),
        because=(*event.detail[-4:], *((f"{by} raised it",) if by else ())),
    )


def row_of_number(number: int) -> Row | None:
    """Return the row of an error number; None if there is none of its own."""
    return _ROWS.get(number)


def _own_words(event: LogEvent) -> str:
    """Return the message of an exception that names no path, if it is more than the kernel's own sentence."""
    message = event.get("message")
    is_bare = not event.get("type") or message.startswith("[Errno")
    return "" if is_bare else message[:200]


def number_of(event: LogEvent) -> int:
    """Return the error number that an event names, by number or by its sentence; 0 if it names none."""
    if event.get("errno").isdigit():
        return int(event.get("errno"))
    return SENTENCES.get(event.get("text").strip().lower(), 0)
