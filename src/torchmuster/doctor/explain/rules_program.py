"""The program: error numbers of the kernel, exceptions, exit codes."""

import errno
import os
import re
from collections.abc import Callable, Iterator

from torchmuster.doctor.explain.case import Case
from torchmuster.doctor.explain.events import Event, Finding, Role
from torchmuster.doctor.explain.weigh import HIGH, MEDIUM, Weight, at

_ERRNO = {
    errno.ENOSPC: ("disk-full", "the disk is full", "make room, or write elsewhere", "df -h PATH; df -i PATH"),
    errno.EDQUOT: ("quota", "the quota of the user or project is used up", "delete what is not needed, or write to scratch", "quota -s; lfs quota -h -u $USER PATH"),
    errno.ESTALE: ("stale-file", "a file on a network file system was replaced by another client", "write to a new name and rename; keep caches of each node local", "stat PATH   on every node"),
    errno.EMFILE: ("open-files", "the limit of open files is reached", "ulimit -n 65536 in the job, torch.multiprocessing.set_sharing_strategy('file_system')", "ulimit -n"),
    errno.EIO: ("disk-error", "the storage gave an input/output error", "the site has to look at the file system; copy the data to the node first", "dmesg | tail"),
    errno.EROFS: ("read-only", "the file system is read-only", "write to a folder that may be written", "mount | grep PATH"),
    errno.EACCES: ("permission", "a file may not be read or written", "chmod, or another path; check the user in the container", "ls -ld PATH; id"),
    errno.ENOENT: ("file-missing", "a file is not there", "check the path on the node that failed: not all file systems are shared", "ls -l PATH   on every node"),
    errno.ENOMEM: ("memory", "memory could not be allocated", "ask for more memory, or use fewer loader workers", "free -g; cat /sys/fs/cgroup/memory.max"),
    errno.ENOTCONN: ("mount-lost", "a mounted file system has lost its server", "the site has to mount it again", "mount | grep PATH"),
    errno.ECONNREFUSED: ("connection-refused", "a connection was refused", "see what should listen there", None),
    errno.ENAMETOOLONG: ("name-too-long", "a path is too long", "set TMPDIR to a shorter folder", None),
}  # fmt: skip


_STRERROR = {os.strerror(number).lower(): number for number in _ERRNO}


def system_errors(case: Case) -> Iterator[Finding]:
    """An error number of the kernel: it says what, the path says where."""
    for event in _first_by(case.of("errno"), lambda e: _number(e)):
        number = _number(event)
        if number not in _ERRNO or event.role is not Role.CAUSE:
            continue
        cause, sentence, cure, confirm = _ERRNO[number]
        path = event.get("path") or next(iter(re.findall(r"'(/[^']+)'", event.line.text)), "")
        if number == errno.ENOSPC and "/dev/shm" in event.line.text:
            cause, sentence, cure = "small-dev-shm", "/dev/shm is full", _SPECIFIC["shm"][2]
        yield Finding(
            cause=cause,
            sentence=f"{sentence}{f': {path}' if path else ''}",
            confidence=HIGH
            if number in (errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EMFILE)
            else MEDIUM,
            weight=Weight.PROVED if number in (errno.ENOSPC, errno.EDQUOT) else Weight.PROGRAM + 2,
            evidence=(event.line,),
            at=event.get("where") or at(event),
            because=event.detail[-4:],
            cure=cure,
            confirm=confirm.replace("PATH", os.path.dirname(path) or "PATH") if confirm else None,
            began=event.line,
        )


def _number(event: Event) -> int:
    if event.get("errno").isdigit():
        return int(event.get("errno"))
    return _STRERROR.get(event.get("text").strip().lower(), 0)


def _first_by(events: list[Event], key: Callable[[Event], object]) -> list[Event]:
    found: dict[object, Event] = {}
    for event in events:
        found.setdefault(key(event), event)
    return list(found.values())


def exceptions(case: Case) -> Iterator[Finding]:
    """The first exception that is nobody's echo."""
    found = [
        e
        for e in case.of("exception", "cuda_oom", "cuda_error", "not_finite", "fatal_python")
        if e.role is Role.CAUSE
    ]
    found = [e for e in found if e.get("type") or e.kind != "exception"]
    raised = [e for e in found if e.kind != "not_finite"]
    if not raised:
        return
    event = case.earliest(raised)
    words = event.get("type") or event.line.text
    if event.get("message"):
        words += f": {event.get('message')}"
    others = len({(e.who, e.get("type")) for e in raised}) - 1
    because = [f"{others} other ranks raised too, later"] if others > 0 else []
    who = str(event.who) or "a rank"
    timed = all(e.line.when is not None for e in raised)
    several_files = len({e.line.path for e in raised}) > 1
    cause, cure, confirm = _program_cause(event)
    yield Finding(
        cause=cause,
        sentence=f"{who} failed first: {words[:300]}",
        confidence=HIGH
        if (timed or not several_files) and (event.get("own") or event.kind != "exception")
        else MEDIUM,
        weight=Weight.PROGRAM,
        evidence=(event.line,),
        at=event.get("where") or at(event),
        because=(*event.detail[-6:-1], *because),
        ruled_out=_echoes_ruled_out(case),
        cure=cure,
        confirm=confirm,
        began=event.line,
    )


def _program_cause(event: Event) -> tuple[str, str, str | None]:
    text = f"{event.get('type')}: {event.get('message')} {event.line.text}"
    if event.kind == "cuda_oom":
        return (
            "cuda-out-of-memory",
            "a smaller batch, activation checkpointing, or FSDP; look for another process on that GPU",
            "nvidia-smi   on that node",
        )
    if event.kind == "cuda_error":
        return (
            "cuda-error",
            "run again with CUDA_LAUNCH_BLOCKING=1: the line that is named may be a later one",
            "compute-sanitizer python ...",
        )
    if "Expected to have finished reduction" in text:
        return (
            "unused-parameters",
            "find_unused_parameters=True for DDP, or use all parameters in the loss",
            "TORCH_DISTRIBUTED_DEBUG=DETAIL names them",
        )
    if "DDP expects same model across all ranks" in text:
        return (
            "models-differ",
            "the ranks built different models: the same configuration and seed everywhere",
            None,
        )
    if event.get("type").endswith(("ModuleNotFoundError", "ImportError")):
        return (
            "package-missing",
            "install it in the environment of that node, the one that the job uses",
            "python -c 'import ...'   on every node",
        )
    if event.get("type").endswith("MemoryError"):
        return "memory", "ask for more memory, or use fewer loader workers", "free -g"
    return "exception", "mend the line that is named; the other ranks' errors follow from it", None


def _echoes_ruled_out(case: Case) -> tuple[str, ...]:
    lost = case.of("peer_lost", "nccl_remote", "watchdog", "gloo_timeout")
    if not lost:
        return ()
    return (
        f"the network: {len(lost)} lines of lost connections came from ranks that had lost their peer",
    )
