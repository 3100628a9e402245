"""Error numbers of the kernel: they say what, the path says where."""

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.events import LineRole, LogEvent, LogFinding
from torchmuster.diagnose.explain.sentences import SENTENCES
from torchmuster.diagnose.explain.weigh import HIGH, LOW, MEDIUM, Weight, at
from torchmuster.diagnose.finding import Confidence

SMALL_SHM_CURE = "--shm-size=8g or --ipc=host for the container, or fewer loader workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meaning:
    cause: str
    error: str
    hint: str
    confirm: str | None = None
    confidence: Confidence = MEDIUM
    weight: int = Weight.PROGRAM + 2


_MEANINGS = {
    errno.ENOSPC: _Meaning(
        cause="disk-full",
        error="the disk is full",
        hint="make room, or write elsewhere",
        confirm="df -h PATH; df -i PATH",
        confidence=HIGH,
        weight=Weight.PROVED,
    ),
    errno.EDQUOT: _Meaning(
        cause="quota",
        error="the quota of the user or project is used up",
        hint="delete what is not needed, or write to scratch",
        confirm="quota -s; lfs quota -h -u $USER PATH",
        confidence=HIGH,
        weight=Weight.PROVED,
    ),
    errno.ESTALE: _Meaning(
        cause="stale-file",
        error="a file on a network file system was replaced by another client",
        hint="write to a new name and rename; keep caches of each node local",
        confirm="stat PATH   on every node",
        confidence=HIGH,
    ),
    errno.EMFILE: _Meaning(
        cause="open-files",
        error="the limit of open files is reached",
        hint="ulimit -n 65536 in the job, or torch.multiprocessing.set_sharing_strategy('file_system')",
        confirm="ulimit -n",
        confidence=HIGH,
    ),
    errno.EIO: _Meaning(
        cause="disk-error",
        error="the storage gave an input/output error",
        hint="the site has to look at the file system; copy the data to the node first",
        confirm="dmesg | tail",
    ),
    errno.EROFS: _Meaning(
        cause="read-only",
        error="the file system is read-only",
        hint="write to a folder that may be written",
        confirm="findmnt -T PATH",
    ),
    errno.EACCES: _Meaning(
        cause="permission",
        error="a file may not be read or written",
        hint="chmod, or another path; check the user in the container",
        confirm="ls -ld PATH; id",
    ),
    errno.ENOENT: _Meaning(
        cause="file-missing",
        error="a file is not there",
        hint="check the path on the node that failed: not all file systems are shared",
        confirm="ls -l PATH   on every node",
    ),
    errno.ENOMEM: _Meaning(
        cause="memory",
        error="memory could not be allocated",
        hint="ask for more memory, or use fewer loader workers",
        confirm="free -g; cat /sys/fs/cgroup/memory.max",
    ),
    errno.EAGAIN: _Meaning(
        cause="system-error",
        error="no more processes or threads may be started",
        hint="OMP_NUM_THREADS=1 and fewer loader workers; a higher `ulimit -u`, or pids limit of the container",
        confirm="ulimit -u; cat /sys/fs/cgroup/pids.max",
    ),
    errno.ENOTCONN: _Meaning(
        cause="mount-lost",
        error="a mounted file system has lost its server",
        hint="the site has to mount it again; leave the node out until then",
        confirm="findmnt -T PATH",
    ),
    errno.ECONNREFUSED: _Meaning(
        cause="connection-refused",
        error="a connection was refused",
        hint="see what should listen there",
    ),
    errno.ENAMETOOLONG: _Meaning(
        cause="name-too-long",
        error="a path is too long",
        hint="set TMPDIR to a shorter folder",
        confirm="echo ${#TMPDIR}",
    ),
}
_MEANINGS[errno.EPERM] = _MEANINGS[errno.EACCES]
_MEANINGS[errno.ENFILE] = _MEANINGS[errno.EMFILE]
_MEANINGS[errno.ESHUTDOWN] = _MEANINGS[errno.EHOSTDOWN] = _MEANINGS[errno.ENOTCONN]
_IN_SHM = re.compile(r"/dev/shm|</?torch_\d|shared memory")
_PATH = re.compile(r"'(/[^']+)'")


def system_errors(case: Case) -> Iterator[LogFinding]:
    """The first line of each error number; what ended a process says more than what it logged before."""
    seen: set[int] = set()
    for event in sorted(case.of("errno"), key=lambda event: not event.get("uncaught")):
        number = number_of(event)
        if not number or number in seen or event.role is not LineRole.CAUSE:
            continue
        seen.add(number)
        yield _finding(event, number)


def _finding(event: LogEvent, number: int) -> LogFinding:
    meaning = _MEANINGS.get(number) or _Meaning(
        cause="system-error",
        error=f"the kernel answered {errno.errorcode.get(number, number)}: {os.strerror(number).lower()}",
        hint="see what the path is, who else uses it, and on which file system it is",
    )
    path = event.get("path") or next(iter(_PATH.findall(event.line.text)), "")
    cause, sentence, cure = meaning.cause, meaning.error, meaning.hint
    if number == errno.ENOSPC and (_IN_SHM.search(event.line.text) or "torch_" in path):
        cause, sentence, cure = "small-dev-shm", "/dev/shm is full", SMALL_SHM_CURE
    raised = bool(event.get("type"))
    return LogFinding(
        cause=cause,
        error=f"{sentence}{f': {path}' if path else ''}",
        confidence=meaning.confidence if raised or meaning.confidence is HIGH else LOW,
        weight=meaning.weight
        if raised or meaning.weight == Weight.PROVED
        else Weight.COLLECTIVE - 1,
        evidence=(event.line,),
        at=event.get("where") or at(event),
        because=event.detail[-4:],
        hint=cure,
        confirm=_filled(meaning.confirm, path),
        began=event.line,
    )


def _filled(command: str | None, path: str) -> str | None:
    return command.replace("PATH", os.path.dirname(path) or "PATH") if command else None


def number_of(event: LogEvent) -> int:
    """Return the error number that an event names, by number or by its sentence; 0 if it names none."""
    if event.get("errno").isdigit():
        return int(event.get("errno"))
    return SENTENCES.get(event.get("text").strip().lower(), 0)
