"""Collect the Python stacks of this node's ranks within a second, and the kernel's view of them.

A worker's faulthandler writes its stacks into a file on `STACK_SIGNAL` (`spawner/last_words.py`),
even while C code holds the interpreter's lock. We send the signal only to a process that has that
file open and catches the signal: it would kill any other. A process that is stopped or sleeps
uninterruptibly can't answer; for it we ask py-spy, where installed, and the kernel.
"""

import ipaddress
import os
import re
import select
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torchmuster.core import proc
from torchmuster.core.files.layout import last_bytes
from torchmuster.core.model import contract
from torchmuster.core.node.kernel import open_files, read_bytes, read_text
from torchmuster.errors import MusterError
from torchmuster.launcher.facts import stacks as reading
from torchmuster.launcher.model.progress import RankStack, StoreCall

LIMIT_S = 1.0
MAX_TEXT_BYTES = 12 << 10
_MAX_CHILDREN = 8
_AT_ONCE = 12
_MAX_READ_BYTES = 256 << 10
_QUIET_S = 0.03  # without a write for so long, faulthandler is done
_POLL_S = 0.005
_SPY_LIMIT_S = 3.0
_SPIES_AT_ONCE = 16
_MAX_SOURCE_BYTES = 1 << 20
_STOPPED = ("T", "t")
_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")


@dataclass(slots=True)
class _SignalledProcess:
    """A process that was sent the signal, and the state of its stack file."""

    pid: int
    path: str
    size: int
    changed_at: float
    began: bool = False


def take_stacks(
    folder: str,
    attempt: int,
    workers: Sequence[tuple[int, int]],
    limit_s: float = LIMIT_S,
    logs: Mapping[int, str] | None = None,
) -> tuple[RankStack, ...]:
    """Return the stacks of the given ranks, within about `limit_s`, or 3 s more with py-spy.

    Args:
        folder: Folder of the workers' stack files.
        attempt: The attempt that they belong to.
        workers: (rank, pid) pairs.
        limit_s: How long a worker may take to write.
        logs: Rank -> path of its log, where torch names the store that it calls.
    """
    deadline = time.monotonic() + limit_s
    paths = {rank: contract.stacks_path(folder, attempt, rank) for rank, _ in workers}
    texts = _ask([(pid, paths[rank]) for rank, pid in workers], deadline)
    spied = _spy_all([pid for _, pid in workers if not texts.get(pid)])
    found = [_stack(rank, pid, texts.get(pid, ""), spied) for rank, pid in workers]
    found = [_with_children(stack, paths[stack.rank]) for stack in found]
    return tuple(_with_stores(found, logs or {}))


def pieces(stacks: Sequence[RankStack]) -> list[tuple[tuple[RankStack, ...], bool]]:
    """Split the stacks into parts that fit a message; return each with whether it is the last."""
    parts = [tuple(stacks[at : at + _AT_ONCE]) for at in range(0, len(stacks), _AT_ONCE)] or [()]
    return [(part, number == len(parts)) for number, part in enumerate(parts, 1)]


def _stack(rank: int, pid: int, text: str, spied: Mapping[int, tuple[str, str]]) -> RankStack:
    facts = proc.read_process(pid)
    state = facts.state if facts is not None else ""
    why_not = ""
    if not text:
        text, why_not = spied[pid]
    text = reading.main_first(text)
    return RankStack(
        rank=rank,
        pid=pid,
        state=state,
        text=text[:MAX_TEXT_BYTES],
        source=_source(text),
        kernel=where_in_kernel(pid),
        why_not=why_not,
        uses_gpu=any(one.startswith(_GPU_DEVICES) for one in open_files(pid)),
    )


def _with_children(stack: RankStack, path: str) -> RankStack:
    """Add the stacks of loader processes to those of a rank that waits for them."""
    if not reading.waits_for_loader(stack.text):
        return stack
    pids = [p for p in proc.children_of(stack.pid) if _answers(p, path)][:_MAX_CHILDREN]
    texts = []
    for pid in pids:  # one at a time: they share the file
        said = _ask([(pid, path)], time.monotonic() + LIMIT_S / 2)
        text = reading.main_first(said.get(pid, ""))
        facts = proc.read_process(pid)
        stopped = facts is not None and facts.state in _STOPPED
        texts.append(text[: MAX_TEXT_BYTES // 8] or ("stopped (SIGSTOP)" if stopped else ""))
    return replace(stack, children=tuple(text for text in texts if text))


def _with_stores(stacks: Sequence[RankStack], logs: Mapping[int, str]) -> list[RankStack]:
    """Add the connections of the ranks that are connecting to a store."""
    if not any(reading.makes_store(one.text, one.source) for one in stacks):
        return list(stacks)
    deadline = time.monotonic() + LIMIT_S
    return [
        replace(one, store=look(one.pid, one.text, logs.get(one.rank, ""), deadline))
        if reading.makes_store(one.text, one.source)
        else one
        for one in stacks
    ]


# faulthandler.


def _ask(processes: Sequence[tuple[int, str]], deadline: float) -> dict[int, str]:
    """Send the signal to the processes that answer it; return what they wrote, by pid."""
    asked: list[_SignalledProcess] = []
    for pid, path in processes:
        facts = proc.read_process(pid)
        if facts is None or facts.state in (*_STOPPED, "Z", "X") or not _answers(pid, path):
            continue
        if waits_for_signal(pid):
            continue
        try:
            os.truncate(path, 0)
        except OSError:
            continue
        proc.kill_quietly(pid, contract.STACK_SIGNAL)
        asked.append(_SignalledProcess(pid, path, 0, time.monotonic()))
    _wait_until_written(asked, deadline)
    written = {one.pid: read_bytes(one.path, _MAX_READ_BYTES) for one in asked if one.began}
    return {pid: data.decode(errors="replace") for pid, data in written.items()}


def _wait_until_written(asked: Sequence[_SignalledProcess], deadline: float) -> None:
    while time.monotonic() < deadline:
        now = time.monotonic()
        for one in asked:
            size = _size(one.path)
            if size != one.size:
                one.size, one.changed_at, one.began = size, now, True
        if all(one.began and now - one.changed_at > _QUIET_S for one in asked):
            return
        select.select([], [], [], _POLL_S)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _answers(pid: int, path: str) -> bool:
    """Return whether the process has the stack file open and catches the signal."""
    try:
        same = os.path.samestat(os.stat(f"/proc/{pid}/fd/{contract.STACK_FD}"), os.stat(path))
    except OSError:
        return False
    return same and proc.catches_signal(pid, contract.STACK_SIGNAL)


# py-spy and /proc.


def _spy_all(pids: Sequence[int]) -> dict[int, tuple[str, str]]:
    """Return the result of `_spy` for several processes, asked in parallel."""
    if len(pids) < 2:
        return {pid: _spy(pid) for pid in pids}
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_SPIES_AT_ONCE) as pool:
        return dict(zip(pids, pool.map(_spy, pids), strict=True))


def _spy(pid: int, find: Callable[[int], str | None] | None = None) -> tuple[str, str]:
    """Return py-spy's output for a process that does not answer, and the reason if empty."""
    facts = proc.read_process(pid)
    state = facts.state if facts is not None else ""
    if not state or state in ("Z", "X"):
        return "", "the process has ended"
    reason = {"T": "it is stopped", "t": "a debugger holds it", "D": "it sleeps in the kernel"}
    why = reason.get(
        state, "it writes no stacks: it is not a Python script, or has closed the file"
    )
    if state == "t":
        return "", why
    if waits_for_signal(pid):
        why = "it waits for a signal, and the signal for stacks would wake it"
    program = (find or find_spy)(pid)
    if program is None:
        return "", f"{why}; py-spy would show more and is not installed here (pip install py-spy)"
    try:
        said = proc.ask([program, "dump", "--nonblocking", "--pid", str(pid)], b"", _SPY_LIMIT_S)
    except MusterError as error:
        return "", f"{why}; {error.why}"
    if said.status != 0:
        last = said.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return "", f"{why}; py-spy: {last[0][:200] if last else 'no answer'}"
    return said.stdout.decode(errors="replace"), ""


def find_spy(pid: int, which: Callable[..., str | None] = shutil.which) -> str | None:
    """Return the py-spy on our PATH, next to the process's interpreter, or on its PATH."""
    path = _first_entry(f"/proc/{pid}/environ", b"PATH=")
    program = _first_entry(f"/proc/{pid}/cmdline", b"")
    its_folder = os.path.dirname(program) if os.path.isabs(program) else ""
    return which("py-spy") or next(
        (found for where in (its_folder, path) if where and (found := which("py-spy", path=where))),
        None,
    )


def _first_entry(path: str, prefix: bytes) -> str:
    """Return the first entry of a /proc file that begins with the prefix, without the prefix."""
    words = read_bytes(path, _MAX_SOURCE_BYTES).split(b"\0")
    chosen = next((word for word in words if word.startswith(prefix)), b"")
    return os.fsdecode(chosen.removeprefix(prefix))


def where_in_kernel(pid: int) -> str:
    """Return the kernel function in which a process sleeps; empty if unknown."""
    word = read_text(f"/proc/{pid}/wchan").strip()
    return word if re.fullmatch(r"[A-Za-z_][\w.]*", word) else ""


def waits_for_signal(pid: int) -> bool:
    """Return whether a process waits for any signal (`signal.pause()`): ours would wake it."""
    return re.search(r"pause|sigsuspend", where_in_kernel(pid)) is not None


def _source(text: str) -> str:
    """Return the source line of the script that the main thread is executing."""
    frame = reading.user_frame(reading.main_frames(text))
    if frame is None:
        return ""
    lines = read_bytes(frame.file, _MAX_SOURCE_BYTES).split(b"\n")
    inside = 0 < frame.line <= len(lines)
    return lines[frame.line - 1].decode(errors="replace").strip()[:200] if inside else ""


# Which store a rank calls: the script may have changed MASTER_ADDR or MASTER_PORT.
#
# There are three sources, none sufficient alone: the kernel lists a process's connections (a refused
# call leaves none), torch names the address in the rank's log when a call has failed, and the
# script's own lines show where it was set.


_MAX_FDS = 4096
_MAX_TABLE_BYTES = 4 << 20
_MAX_ENDS = 16
_MAX_LOG_BYTES = 64 << 10
_MAX_SCRIPT_BYTES = 1 << 20
_MAX_LINES = 8
_LOG_POLL_S = 0.05
_ESTABLISHED, _SYN_SENT = "01", "02"  # include/net/tcp_states.h
# Source: torch/csrc/distributed/c10d/TCPStore.cpp and socket.cpp, torch 2.6 to 2.13.
_NAMED = re.compile(
    rb"(?:failed to connect/validate to host |client socket has failed to connect to )"
    rb"\[?(?P<host>[\w.:-]{1,255}?)\]?:(?P<port>\d{1,5})\b"
)
_SETS = re.compile(
    r"""environ\[\s*["']MASTER_(ADDR|PORT)["']\s*\]\s*=[^=]|putenv\(\s*["']MASTER_(ADDR|PORT)"""
    r"""|["']MASTER_(ADDR|PORT)["']\s*:|init_method\s*=|["']tcp://|\bTCPStore\("""
)


def look(pid: int, text: str, log_path: str, deadline: float) -> StoreCall:
    """Return the evidence on the store to which a rank is connecting.

    Args:
        pid: Process id of the rank.
        text: Its stacks.
        log_path: Path of its log, polled until torch has named an address there.
        deadline: When to stop polling, in seconds of the monotonic clock.
    """
    connected, calling = _connections(pid)
    named = "" if connected or calling else _named(log_path, deadline)
    return StoreCall(connected=connected, calling=calling, named=named, lines=_lines(text))


def _connections(pid: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the peers of the process's TCP connections: the established, then the unanswered."""
    inodes = _sockets(pid)
    found: dict[str, list[str]] = {_ESTABLISHED: [], _SYN_SENT: []}
    for table in ("tcp", "tcp6"):
        for line in (
            read_bytes(f"/proc/{pid}/net/{table}", _MAX_TABLE_BYTES).decode().splitlines()[1:]
        ):
            words = line.split()
            if len(words) > 9 and words[9] in inodes and words[3] in found:
                found[words[3]].append(read_end(words[2]))
    first, second = (tuple(sorted(set(ends)))[:_MAX_ENDS] for ends in found.values())
    return first, second


def read_end(word: str) -> str:
    """Return a /proc/net/tcp address (words in native byte order) as `10.0.0.1:29501`."""
    host, _, port = word.partition(":")
    packed = b"".join(
        int(host[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(host), 8)
    )
    address = ipaddress.ip_address(packed)
    mapped = getattr(address, "ipv4_mapped", None)
    return f"{mapped or address}:{int(port, 16)}"


def _sockets(pid: int) -> set[str]:
    """Return the inodes of the process's sockets."""
    found = (one for one in open_files(pid, _MAX_FDS) if one.startswith("socket:["))
    return {one[len("socket:[") : -1] for one in found}


def _named(path: str, deadline: float) -> str:
    """Return the address at the end of a log, where torch names it if our signal broke its call."""
    while path:
        found = list(_NAMED.finditer(last_bytes(path, _MAX_LOG_BYTES)))
        if found:
            return f"{found[-1]['host'].decode()}:{found[-1]['port'].decode()}"
        if time.monotonic() >= deadline:
            break
        select.select([], [], [], _LOG_POLL_S)
    return ""


def _lines(text: str) -> tuple[str, ...]:
    """Return the lines that set the address of a store in the script's files on the stack."""
    found: list[str] = []
    frames = reading.main_frames(text)
    for file in dict.fromkeys(f.file for f in frames if not reading.is_library(f.file)):
        script = read_bytes(file, _MAX_SCRIPT_BYTES).decode(errors="replace")
        for number, line in enumerate(script.splitlines(), 1):
            code = line.strip()
            if _SETS.search(code) and not code.startswith("#"):
                found.append(f"{os.path.basename(file)}:{number}: {code[:100]}")
    return tuple(found[:_MAX_LINES])
