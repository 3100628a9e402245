"""The workers of one attempt on one node: starts them, watches them end, gathers the evidence."""

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torchmuster.core import plugs
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import contract, failure
from torchmuster.core.model import progress as heartbeat
from torchmuster.core.model.contract import GLOO, INTERFACE_VARIABLES, NCCL, TENSORPIPE
from torchmuster.core.model.lines import Terminal, line_prefix
from torchmuster.core.model.progress import HeartbeatRecord
from torchmuster.core.net import ipc
from torchmuster.core.net.messages import StartAttempt
from torchmuster.core.node import kernel as memory
from torchmuster.core.node.kernel import read_bytes, read_text
from torchmuster.core.node.options import VariableChange
from torchmuster.core.node.output import RankOutput, Show
from torchmuster.core.node.spawner.messages import SignalWorkerProcesses, SpawnerOrder, StartWorker

# What workers leave for the agent of their node: heartbeats, and memory that outlives them.
#
# The memory is anonymous files held by the agent. Workers map them, so no data passes through the
# agent. The workers of the next attempt find them there. The kernel frees them when the agent ends
# in any way, while a file in /dev/shm would remain.


MOST_FILES = 512
_NAME = re.compile(r"[a-z0-9.-]{1,64}")


class HeldMemory:
    """The memory files that an agent holds, by name; empty ones take no memory."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def close(self) -> None:
        """Release all memory."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    @property
    def is_used(self) -> bool:
        """Return whether anything is held."""
        return bool(self._descriptors)

    def answer(self, ask: ipc.AskMemory) -> ipc.AgentAnswer:
        """Drop the files in `ask.drop`, create those missing in `ask.names`; return all held."""
        for name in ask.drop:
            if name in self._descriptors:
                os.close(self._descriptors.pop(name))
        wanted = [name for name in dict.fromkeys(ask.names) if name not in self._descriptors]
        if any(not _NAME.fullmatch(name) for name in wanted):
            return ipc.CallFailed(
                what="memory has a name of small letters, digits, dots and hyphens"
            )
        if len(self._descriptors) + len(wanted) > MOST_FILES:
            return ipc.CallFailed(what=f"an agent holds {MOST_FILES} pieces of memory at most")
        try:
            for name in wanted:
                self._descriptors[name] = os.memfd_create(f"muster-{name}", os.MFD_CLOEXEC)
        except OSError as error:
            return ipc.CallFailed(
                what="the node gives no memory", why=os.strerror(error.errno or 0)
            )
        return ipc.MemoryHeld(pid=os.getpid(), descriptors=dict(self._descriptors))


def last_step(folder: str, attempt: int, rank: int) -> int | None:
    """Return the last step that a rank has done, also after its end; None if it reported none."""
    beat = read_beat(folder, attempt, rank)
    return beat.step if beat is not None and beat.steps_here else None


def read_beat(folder: str, attempt: int, rank: int) -> HeartbeatRecord | None:
    """Return the last heartbeat of a rank; None if there is none."""
    path = heartbeat.heartbeat_path(folder, attempt, rank)
    for _ in range(3):  # it may be half-written
        beat = heartbeat.unpack(read_bytes(path, heartbeat.PAGE_BYTES))
        if beat is not None:
            return beat
    return None


# The JSON that torchrun writes about a failure: next to the logs, and to the launcher's
# TORCHELASTIC_ERROR_FILE.
#
# Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py (2.13).

VARIABLE = "TORCHELASTIC_ERROR_FILE"
_MAX_BYTES = 1 << 20


def read_recorded(path: str) -> str | None:
    """Return what the worker itself has written by `@record`; None if it is empty or too long."""
    data = read_bytes(path, _MAX_BYTES + 1)
    return data.decode(errors="replace") if 0 < len(data) <= _MAX_BYTES else None


def error_text(end: failure.WorkerEnd, recorded: str | None, now_s: float) -> str | None:
    """Return the JSON on an end: the worker's own with its exit code, else one on its exception.

    Return None if neither is known.
    """
    plain = None
    with contextlib.suppress(ValueError):
        plain = json.loads(recorded) if recorded is not None else None
    if not isinstance(plain, dict):
        if end.error is None:
            return None
        error_info = {"py_callstack": end.error.traceback, "timestamp": str(int(now_s))}
        what = f"{end.error.type_name}: {end.error.message}"
        plain = {"message": {"message": what, "extraInfo": error_info}}
    message = plain.get("message")
    code = -end.signum if end.signum is not None else end.exit_code
    if isinstance(message, dict) and code:
        message["errorCode"] = code
    return json.dumps(plain)


def root_cause(ends: Sequence[failure.WorkerEnd], texts: Mapping[int, str]) -> str | None:
    """Return the JSON of the failure that explains the others on this node."""
    cause = failure.first_cause([end for end in ends if end.rank in texts])
    return texts[cause.rank] if cause is not None else None


@dataclass(slots=True)
class _Worker:
    rank: int
    local_rank: int
    output: RankOutput
    started_at: float
    stdin_fd: int | None = None
    input: bytearray = field(default_factory=bytearray)  # what the worker has not read yet
    input_ends: bool = False
    pid: int | None = None
    ended: bool = False
    error: failure.PythonError | None = None
    ended_well: bool = False  # the script has; the interpreter may still be exiting
    largest_group: int | None = None
    value: failure.ValueNote | None = None
    code: failure.RanCode | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings that all workers of an attempt on this node share.

    Attributes:
        gives_input: Workers share the agent's standard input, as under torchrun: each reads what
            the others have left.
    """

    run_id: str
    run_dir: RunDir
    role: str
    extra_env: dict[str, str]
    base_env: Mapping[str, str]
    shown: Callable[[int, int], frozenset[int]]
    saved: Callable[[int, int, int], str | None] | None = None
    gpus: tuple[str, ...] = ()
    virtual_local_rank: bool = False
    has_store: bool = True
    nccl_files: bool = False
    terminal: Terminal | None = None
    prefixes: bool = False
    every_line: tuple[int, ...] = ()
    gives_input: bool = False

    def terminal_of(self, rank: int) -> Terminal | None:
        """Return the terminal for a rank: narrower if its lines are prefixed with its name."""
        if self.terminal is None or not self.prefixes:
            return self.terminal
        return self.terminal.behind(line_prefix(f"rank {rank}"))


class OrderTaker(Protocol):
    """Starts workers on order: the link to a spawner, or what takes orders in front of one."""

    def order(self, message: SpawnerOrder, fds: Sequence[int] = ()) -> None:
        """Send an order with descriptors, which are closed once sent."""


class NodeAttempt:
    """One attempt on this node, from its start to the last reaped process."""

    def __init__(
        self,
        order: StartAttempt,
        settings: WorkerSettings,
        spawner: OrderTaker,
        on_end: Callable[[failure.WorkerEnd], None],
    ) -> None:
        self.order = order
        self.attempt = order.attempt
        self.asked = False
        self.killed = False
        self.reaped = False
        self.ends: list[failure.WorkerEnd] = []
        self.problems: list[str] = []  # sentences for the user about the start
        self._settings = settings
        self._spawner = spawner
        self._on_end = on_end
        self._workers: dict[int, _Worker] = {}
        self._counters: dict[str, int] = {}
        self._evidence_tasks: list[asyncio.Task[None]] = []
        self.error_texts: dict[int, str] = {}  # rank -> JSON as torchrun writes it
        self._disk: DiskWriter | None = None
        # The agent's folder, which holds heartbeats and stacks.
        self.folder = os.path.dirname(settings.extra_env[contract.SOCKET_VARIABLE])

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the pids of the workers that have started."""
        return tuple(w.pid for w in self._workers.values() if w.pid is not None)

    @property
    def all_started(self) -> bool:
        """Return whether every worker has a process."""
        return all(w.pid is not None for w in self._workers.values())

    @property
    def running_pids(self) -> set[int]:
        """Return the pids of the workers that are running."""
        return {pid for _, pid in self.running}

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks of this node."""
        return tuple(self._workers)

    @property
    def running(self) -> list[tuple[int, int]]:
        """Return (rank, pid) of the workers that are running."""
        return [
            (w.rank, w.pid) for w in self._workers.values() if w.pid is not None and not w.ended
        ]

    def log_of(self, rank: int) -> str:
        """Return the path of a rank's log."""
        return self._settings.run_dir.rank_log(self.attempt, rank)

    def environment_of(self, rank: int) -> VariableChange:
        """Return how a rank's environment differs from the job's."""
        return self._environment(self._workers[rank])

    def start(
        self,
        disk: DiskWriter,
        show: Show | None,
        must_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        """Order the workers from the spawner.

        `must_wait` returns whether the reader of their output is slower than they are.
        """
        self._counters = memory.read_counters()
        self._disk = disk
        num, num_gpus = self.order.ranks.num_workers, len(self._settings.gpus)
        if num > num_gpus > 0 and self.attempt == 0:
            gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
            self.problems.append(
                f"{num} workers on a node with {gpus}: those that use CUDA have to share"
            )
        for local_rank in range(num):
            rank = self.order.ranks.first_rank + local_rank
            output = RankOutput(
                rank,
                self.log_of(rank),
                disk,
                show,
                self._settings.shown(rank, local_rank),
                self._copies(local_rank),
                self._settings.terminal_of(rank),
                every_line=self._settings.every_line,
                must_wait=must_wait,
            )
            worker = _Worker(rank, local_rank, output, time.monotonic())
            self._workers[rank] = worker
            self._start_worker(worker)

    def _copies(self, local_rank: int) -> dict[int, str]:
        """Return the additional log files for torchrun's --log-dir, by stream."""
        saved = self._settings.saved
        if saved is None:
            return {}
        paths = {stream: saved(self.attempt, local_rank, stream) for stream in (1, 2)}
        named = {stream: path for stream, path in paths.items() if path is not None}
        for path in named.values():
            if self._disk is not None:
                self._disk.append(path, b"")  # the file exists even if nothing is written
        return named

    def _start_worker(self, worker: _Worker) -> None:
        order = self.order
        stdout, stderr = worker.output.open()
        if worker.output.problem is not None:
            self.problems.append(worker.output.problem)
        if order.stdin_rank == worker.rank:
            stdin, worker.stdin_fd = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(worker.stdin_fd, False)
        else:
            stdin = self._input()
        change = self._environment(worker)
        self._spawner.order(
            StartWorker(rank=worker.rank, env=dict(change.values), unset=tuple(change.removed)),
            [stdin, stdout, stderr],
        )

    def _input(self) -> int:
        if self._settings.gives_input:
            with contextlib.suppress(OSError):  # standard input is closed
                return os.dup(0)
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _environment(self, worker: _Worker) -> VariableChange:
        order, settings = self.order, self._settings
        virtual = settings.virtual_local_rank and bool(settings.gpus)
        place = contract.WorkerRanks(
            rank=worker.rank,
            local_rank=0 if settings.virtual_local_rank else worker.local_rank,
            world_size=order.world_size,
            local_world_size=order.ranks.num_workers,
            node_rank=order.ranks.node_rank,
            num_nodes=order.num_nodes,
            role_rank=order.ranks.first_role_rank + worker.local_rank,
            role_world_size=order.ranks.role_world_size,
        )
        facts = contract.AttemptFacts(
            run_id=settings.run_id,
            attempt=order.attempt,
            restarts_spent=order.restarts_spent,
            max_restarts=order.max_restarts,
            master_addr=order.master_addr,
            master_port=order.master_port,
            role=settings.role,
            has_store=settings.has_store,
        )
        others: dict[str, str] = {}
        removed: list[str] = []
        for change_of in plugs.every("worker_variables"):
            change: VariableChange = change_of(settings.base_env, place, order.tasks_per_node)
            others |= change.values
            removed += change.removed
        environment = {
            **others,
            **settings.extra_env,
            **contract.worker_environment(place, facts),
        }
        environment[VARIABLE] = self._error_file(worker.rank)
        if settings.nccl_files:
            folder = settings.run_dir.attempt_logs(order.attempt)
            environment["NCCL_DEBUG_FILE"] = os.path.join(folder, f"nccl-{worker.rank}.log")
        if virtual:
            environment["CUDA_VISIBLE_DEVICES"] = settings.gpus[worker.local_rank]
        return VariableChange(values=environment, removed=tuple(removed))

    # Reports on the workers.

    def note_started(self, rank: int, pid: int) -> None:
        """Record the process of a rank."""
        worker = self._workers[rank]
        worker.pid = pid
        worker.started_at = time.monotonic()

    def note_report(self, pid: int, report: ipc.WorkerReport) -> int | None:
        """Record a worker's report on its own end; return its rank, None if it is unknown."""
        worker = next((w for w in self._workers.values() if w.pid == pid), None)
        if worker is None:
            return None
        if isinstance(report, ipc.WorkerFailed):
            worker.error, worker.code = report.error, report.code
            if failure.is_echo(worker.error):
                worker.output.mute()  # its traceback would hide the cause
        elif isinstance(report, ipc.WorkerEndedWell):
            worker.ended_well, worker.largest_group = True, report.largest_group
            worker.code = report.code
        elif isinstance(report, ipc.ValueKept):
            worker.value = failure.ValueNote(**vars(report))
        return worker.rank

    def note_exit(self, rank: int, status: int) -> None:
        """Report the end of a worker, given its wait status, with the evidence."""
        worker = self._workers[rank]
        worker.ended = True
        worker.output.drain()
        asked = self.asked or self.killed
        signum = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        code = os.WEXITSTATUS(status) if signum is None else None
        if signum == signal.SIGKILL and not asked and worker.pid is not None:
            ending = self._end_with_evidence(worker, worker.pid)
            self._evidence_tasks.append(asyncio.get_running_loop().create_task(ending))
            return
        self._finish(self._end(worker, asked=asked, signum=signum, code=code))

    async def _end_with_evidence(self, worker: _Worker, pid: int) -> None:
        evidence = await self.memory_evidence(pid)
        self._finish(self._end(worker, signum=int(signal.SIGKILL), evidence=evidence))

    async def memory_evidence(self, pid: int = 0) -> str | None:
        """Return the evidence that memory was the reason for a SIGKILL; None without any.

        `pid` selects the kernel's log line on a process.
        """
        try:
            async with asyncio.timeout(1.0):
                return await asyncio.to_thread(memory.explain_kill, self._counters, pid)
        except TimeoutError:
            return None

    def _end(
        self,
        worker: _Worker,
        *,
        asked: bool = False,
        signum: int | None = None,
        code: int | None = None,
        evidence: str | None = None,
    ) -> failure.WorkerEnd:
        return failure.WorkerEnd(
            attempt=self.attempt,
            rank=worker.rank,
            local_rank=worker.local_rank,
            node=self.order.node,
            kind=_kind_of(signum, code, worker.error, ended_well=worker.ended_well and not asked),
            asked=asked,
            elapsed_s=round(time.monotonic() - worker.started_at, 3),
            exit_code=code,
            signum=signum,
            error=worker.error if signum is not None or code else None,
            tail=worker.output.tail(),
            memory_evidence=evidence,
            step=last_step(self.folder, self.attempt, worker.rank),
            largest_group=worker.largest_group,
            value=worker.value,
            code=worker.code,
        )

    def _error_file(self, rank: int) -> str:
        return os.path.join(self.folder, f"error-{self.attempt}-{rank}.json")

    def _keep_error(self, end: failure.WorkerEnd) -> None:
        """Keep the JSON on a failure, as torchrun does, and write it next to --log-dir's logs."""
        text = error_text(end, read_recorded(self._error_file(end.rank)), time.time())
        if text is None:
            return
        self.error_texts[end.rank] = text
        saved = self._settings.saved
        path = saved(self.attempt, end.local_rank, 0) if saved is not None else None
        if path is not None and self._disk is not None:
            self._disk.append(path, text.encode())  # it makes the folder
            self._disk.close_file(path)

    def _finish(self, end: failure.WorkerEnd) -> None:
        if end.is_failure:
            self._keep_error(end)
        self.ends.append(end)
        self._on_end(end)

    def note_lost(self, detail: str, memory_evidence: str | None = None) -> None:
        """Report that all workers here have ended, or will, through no fault of their own."""
        first = min(self._workers.values(), key=lambda w: w.rank)
        for worker in self._workers.values():
            worker.ended = True
        self._finish(
            failure.WorkerEnd(
                attempt=self.attempt,
                rank=first.rank,
                local_rank=first.local_rank,
                node=self.order.node,
                kind=failure.EndKind.NODE_LOST,
                asked=self.killed or self.asked,
                elapsed_s=round(time.monotonic() - first.started_at, 3),
                signum=int(signal.SIGKILL),
                detail=detail,
                tail=first.output.tail(),
                memory_evidence=memory_evidence,
            )
        )

    # Orders.

    def resize(self, terminal: Terminal) -> None:
        """Apply a new size of the terminal that shows ranks."""
        self._settings = replace(self._settings, terminal=terminal)
        for worker in self._workers.values():
            worker.output.resize(self._settings.terminal_of(worker.rank) or terminal)

    def signal(self, signum: int, *, if_caught: bool) -> None:
        """Send a signal once to each worker process, not to its children."""
        self._spawner.order(SignalWorkerProcesses(signum=signum, if_caught=if_caught))

    def write_input(self, rank: int, text: str, *, end: bool) -> None:
        """Send a worker what the user typed."""
        worker = self._workers.get(rank)
        if worker is None or worker.stdin_fd is None:
            return
        worker.input += text.encode(errors="surrogateescape")
        worker.input_ends = worker.input_ends or end
        self._write_waiting(worker)

    def _write_waiting(self, worker: _Worker) -> None:
        if worker.stdin_fd is None:
            return
        loop = asyncio.get_running_loop()
        try:
            while worker.input:
                del worker.input[: os.write(worker.stdin_fd, worker.input[: 1 << 16])]
        except BlockingIOError:
            loop.add_writer(worker.stdin_fd, self._write_waiting, worker)
            return
        except OSError:  # the worker has ended
            worker.input_ends = True
        loop.remove_writer(worker.stdin_fd)
        if worker.input_ends:
            self._close_input(worker)

    def _close_input(self, worker: _Worker) -> None:
        if worker.stdin_fd is not None:
            asyncio.get_running_loop().remove_writer(worker.stdin_fd)
            os.close(worker.stdin_fd)
            worker.stdin_fd = None

    async def finish(self) -> None:
        """Wait for the last evidence and close the pipes, after all processes are gone."""
        if waiting := [task for task in self._evidence_tasks if not task.done()]:
            await asyncio.gather(*waiting)  # without one, nothing may come between
        for worker in self._workers.values():
            worker.output.close()
            self._close_input(worker)
        self.reaped = True


def _kind_of(
    signum: int | None,
    code: int | None,
    error: failure.PythonError | None,
    *,
    ended_well: bool = False,
) -> failure.EndKind:
    if signum is not None:
        return failure.EndKind.SUCCESS if ended_well else failure.EndKind.SIGNAL
    if code == 0:
        return failure.EndKind.SUCCESS
    if code == contract.EX_TEMPFAIL:
        return failure.EndKind.PREEMPTED
    if error is not None and error.type_name != "SystemExit":
        return failure.EndKind.EXCEPTION
    return failure.EndKind.EXIT_CODE


def network_variables(interface: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that select an interface, without those that user or site have set."""
    # NCCL matches prefixes unless `=` marks an exact name; Gloo and TensorPipe know only plain
    # names.
    wanted = {GLOO: interface, NCCL: f"={interface}", TENSORPIPE: interface}
    kept = {name for name in INTERFACE_VARIABLES if name in environment}
    if _is_in_nccl_file(environment):
        kept.add(NCCL)
    return {name: value for name, value in wanted.items() if name not in kept}


def _is_in_nccl_file(environment: Mapping[str, str]) -> bool:
    """Return whether an NCCL file selects the interface; a variable would silently override it."""
    own = environment.get("NCCL_CONF_FILE") or os.path.join(
        environment.get("HOME", "/"), ".nccl.conf"
    )
    lines = [line for path in (own, "/etc/nccl.conf") for line in read_text(path).splitlines()]
    return any(line.strip().startswith(f"{NCCL}=") for line in lines)
