"""The agent's answers to the head: network survey, facts, progress, stacks, `muster exec`.

A thread reads the progress of this node's ranks every two seconds: their heartbeats, /proc, and the
use of their GPUs. For a script that does not use the training library, the kernel's counters are
the only source. The processes that a rank has started count for the rank; they are looked up every
ten seconds, and at each report of a rank that is idle itself.
"""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from torchmuster.core import proc
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec, contract
from torchmuster.core.model.contract import INTERFACE_VARIABLES
from torchmuster.core.model.plan import Program, ScriptKind
from torchmuster.core.model.progress import HeartbeatRecord
from torchmuster.core.net import messages
from torchmuster.core.node.agent import Agent, AgentPart
from torchmuster.core.node.kernel import read_bytes, visible_gpus
from torchmuster.core.node.options import VariableChange
from torchmuster.core.node.workers import NodeAttempt, read_beat
from torchmuster.launcher.facts.gpu import GpuUse, GpuUseReader
from torchmuster.launcher.model.progress import RankProgress, quantile
from torchmuster.launcher.net import part_messages
from torchmuster.launcher.net.interfaces import link_names, own_interfaces

if TYPE_CHECKING:
    from torchmuster.launcher.node.exec import Execs
    from torchmuster.launcher.node.probe import NetworkProbe


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MIB = 1 << 20
_IDLE_SHARE = 0.02  # of a processor
_LOOK_EVERY_S = 10.0
_Everybody = Callable[[], list[proc.ProcessFacts]]
_UTIME, _STIME = 11, 12  # fields of /proc/PID/stat after the name, from 0


# The progress of ranks.


@dataclass(slots=True)
class _Usage:
    """Total use of a rank and of the processes it has started, including those that have ended."""

    active_s: float = 0.0
    io_bytes: int = 0
    at: float = 0.0
    looked_at: float = 0.0
    session: list[int] = field(default_factory=list)
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)  # pid -> ticks, bytes

    def spend(self, pids: Sequence[int]) -> float:
        """Add what these processes have used since the last call; return its CPU seconds."""
        spent_ticks = 0
        for pid in pids:
            ticks = _ticks(pid)
            if ticks is None:
                continue
            io_bytes = _io_bytes(pid)
            ticks_before, io_before = self.seen.get(pid, (0, 0))
            if ticks < ticks_before:  # another process has got the number
                ticks_before = io_before = 0
            spent_ticks += ticks - ticks_before
            self.io_bytes += max(io_bytes - io_before, 0)
            self.seen[pid] = (ticks, io_bytes)
        spent_s = spent_ticks / _TICKS_PER_S
        self.active_s += spent_s
        return spent_s

    def look(self, pid: int, now: float, everybody: list[proc.ProcessFacts]) -> None:
        """Find the processes that the rank has started."""
        self.looked_at = now
        self.session = [
            p.pid for p in everybody if p.pid != pid and proc.leader_of(p, (pid,)) is not None
        ]
        kept = {pid, *self.session}
        self.seen = {one: used for one, used in self.seen.items() if one in kept}


class ProgressReader:
    """Reads the progress of the ranks of one attempt.

    Args:
        folder: Folder of the workers' heartbeat files.
        attempt: Number of the attempt.
        gpus: Rank -> id of its GPU, as in `CUDA_VISIBLE_DEVICES`; ranks without a GPU are left out.
    """

    def __init__(self, folder: str, attempt: int, gpus: Mapping[int, str] | None = None) -> None:
        self._folder = folder
        self.attempt = attempt
        self._gpus = dict(gpus or {})
        self._gpu_use = GpuUseReader() if self._gpus else None
        self._usage: dict[int, _Usage] = {}

    def read(self, workers: Sequence[tuple[int, int]]) -> tuple[RankProgress, ...]:
        """Return the progress of the given (rank, pid) pairs."""
        now = time.monotonic()
        everybody = cache(proc.all_processes)  # one listing of all processes serves all ranks
        return tuple(self._read_rank(rank, pid, now, everybody) for rank, pid in workers)

    def _read_rank(self, rank: int, pid: int, now: float, everybody: _Everybody) -> RankProgress:
        facts = proc.read_process(pid)
        usage = self._read_usage(rank, pid, now, everybody)
        use = self._gpu_use
        gpu = use.read(self._gpus[rank]) if use is not None and rank in self._gpus else GpuUse()
        beat = read_beat(self._folder, self.attempt, rank)
        return RankProgress(
            rank=rank,
            state=facts.state if facts is not None else "",
            active_s=round(usage.active_s, 3),
            io_bytes=usage.io_bytes,
            rss_mib=sum(_rss_pages(one) for one in (pid, *usage.session)) * _PAGE_BYTES // _MIB,
            gpu_percent=gpu.percent,
            gpu_mib=gpu.mib,
            **_of_beat(beat, now),
        )

    def _read_usage(self, rank: int, pid: int, now: float, everybody: _Everybody) -> _Usage:
        """Return what the rank and the processes it has started have used so far."""
        usage = self._usage.setdefault(rank, _Usage())
        spent_s = usage.spend([pid])
        idle = bool(usage.at) and spent_s < _IDLE_SHARE * (now - usage.at)
        if idle or now - usage.looked_at >= _LOOK_EVERY_S:
            usage.look(pid, now, everybody())
        usage.spend(usage.session)
        usage.at = now
        return usage


def _of_beat(beat: HeartbeatRecord | None, now: float) -> dict[str, Any]:
    """Return the fields that only the training library can fill."""
    if beat is None:
        return {}
    return {
        "beat_age_s": round(max(now - beat.at, 0.0), 3),
        "steps_here": beat.steps_here,
        "step": beat.step,
        "step_at": round(beat.step_at, 6),
        "phase": beat.phase,
        "seconds": tuple(round(value, 6) for value in beat.seconds),
        "median_s": round(quantile(beat.durations, 0.5), 6),
        "p99_s": round(quantile(beat.durations, 0.99), 6),
    }


def _ticks(pid: int) -> int | None:
    text = read_bytes(f"/proc/{pid}/stat")
    if not text:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return int(fields[_UTIME]) + int(fields[_STIME])


def _io_bytes(pid: int) -> int:
    """Return the bytes that the process has read and written, page cache included; 0 if unknown."""
    rows = (line.partition(b":") for line in read_bytes(f"/proc/{pid}/io").splitlines())
    return sum(int(value) for name, _, value in rows if name in (b"rchar", b"wchar"))


def _rss_pages(pid: int) -> int:
    """Return the resident pages of a process, shared ones included; 0 when it has ended."""
    pages = read_bytes(f"/proc/{pid}/statm").split()
    return int(pages[1]) if len(pages) > 1 else 0


# `muster exec` in a training run: a command next to a rank, with the rank's own variables.
#
# A forked worker's /proc/PID/environ is its spawner's, so we pass the variables to the command.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTarget:
    """A worker to enter; its start time tells it from a later process with the same pid."""

    pid: int
    worker_ticks: int
    environment: Mapping[str, str]

    def has_begun(self) -> bool:
        """Return True: a worker has no view of its own to wait for."""
        return True

    def poll(self) -> int | None:
        """Return -1 when the worker has ended: only its parent gets the status."""
        return None if proc.is_running(self.pid) else -1


def rank_target(pid: int, environment: Mapping[str, str]) -> RankTarget | None:
    """Return the worker with this pid as a target; None when it has ended."""
    facts = proc.read_process(pid)
    if facts is None or not facts.can_run:
        return None
    return RankTarget(pid=pid, worker_ticks=facts.start_ticks, environment=environment)


def refuse_unproved(start: part_messages.ExecStart) -> part_messages.ExecRefused:
    """Return the refusal for a head that has not proved its identity: we run no commands for it."""
    return part_messages.ExecRefused(
        exec_id=start.exec_id,
        what="this node has no common key with the head, so it runs no commands for it",
        fix="give all nodes the same key: `--rdzv_conf secret_file=FILE`",
    )


def debugger_order(
    start: part_messages.ExecStart, worker: VariableChange, rank: int
) -> part_messages.ExecStart:
    """Return the order; for the debugger of a rank, with our debugger program as its command."""
    if not start.debugger:
        return start
    path = contract.debugger_socket(worker.values[contract.SOCKET_VARIABLE], rank)
    return replace(start, argv=tuple(proc.node_program("debugger", path)), tty=False)


def wanted_rank(start: part_messages.ExecStart, first_rank: int, num_workers: int) -> int:
    """Return the rank that a client has named; for `node n2`, the first rank of the node."""
    kind, _, name = start.task.partition(" ")
    if kind == "rank" and name.isdecimal() and 0 <= int(name) - first_rank < num_workers:
        return int(name)
    return first_rank


def node_environment(environment: Mapping[str, str], rank: bool) -> dict[str, str]:
    """Return the variables for a command; without those of a single rank when a node was named."""
    own = ("RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_ERROR_FILE")
    return {name: value for name, value in environment.items() if rank or name not in own}


def worker_environment(base: Mapping[str, str], worker: VariableChange) -> dict[str, str]:
    """Return a worker's environment: our own variables, the run's, and those of its rank."""
    every = {**os.environ, **base, **worker.values}
    return {name: value for name, value in every.items() if name not in worker.removed}


# The agent's side of the preflight: collect facts in a thread, send them on request.
#
# The thread is a daemon, so a file system that hangs blocks neither the agent nor its exit.


MAX_FACTS_BYTES = 128 << 10


class FactsServer:
    """Answers `AskFacts` on one node.

    Sends the facts once they are collected and the spawner has reported which torch it imports.
    """

    def __init__(self, send: Callable[[messages.Message], None]) -> None:
        self._send = send
        self._facts: dict[str, Any] | None = None
        self._torch: Mapping[str, Any] | None = None
        self._asked_at: float | None = None
        self._begun = False

    def take(
        self,
        ask: part_messages.AskFacts,
        program: Program,
        environment: Mapping[str, str],
        run_dir: RunDir,
    ) -> None:
        """Start collecting, if that has not started; send again what is known already."""
        self._asked_at = time.time()
        if not self._begun:
            self._begun = True
            loop = asyncio.get_running_loop()
            order = (ask, program, dict(environment), run_dir, loop)
            threading.Thread(target=self._collect, args=order, name="facts", daemon=True).start()
        self._send_if_ready()

    def take_torch(self, found: Mapping[str, Any]) -> None:
        """Record the spawner's report on the torch that it imports; only the first one counts."""
        if self._torch is None:
            self._torch = found
            self._send_if_ready()

    def _collect(
        self,
        ask: part_messages.AskFacts,
        program: Program,
        environment: dict[str, str],
        run_dir: RunDir,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        from torchmuster.launcher.facts.collect import FactsRequest, collect

        has_plan = os.path.exists(run_dir.plan)  # muster torchrun makes its folder later
        order = FactsRequest(
            is_long=ask.is_long,
            environment=environment,
            names=ask.names,
            run_dir=run_dir.path if has_plan else None,
            once_written=run_dir.plan,
            script=script_path(program, ask.script),
            folders=[("snapshots", run_dir.snapshots)] if os.path.isdir(run_dir.snapshots) else (),
        )
        try:
            facts = codec.to_plain(collect(order))
        except Exception as error:  # noqa: BLE001 - the error is reported
            facts = {"unknown": {"all": f"{type(error).__name__}: {error}"[:200]}}
        try:
            loop.call_soon_threadsafe(self._take_facts, facts)
        except RuntimeError:  # the agent has ended meanwhile
            return

    def _take_facts(self, facts: dict[str, Any]) -> None:
        self._facts = facts
        self._send_if_ready()

    def _send_if_ready(self) -> None:
        if self._facts is None or self._torch is None or self._asked_at is None:
            return
        from torchmuster.launcher.facts.collect import torch_facts

        facts = {**self._facts, "torch": codec.to_plain(torch_facts(self._torch))}
        if len(json.dumps(facts)) > MAX_FACTS_BYTES:
            facts = {"unknown": {"all": f"the facts have more than {MAX_FACTS_BYTES >> 10} KiB"}}
        asked_at, self._asked_at = self._asked_at, None
        self._send(part_messages.NodeFacts(facts=facts, asked_at=asked_at, sent_at=time.time()))


def script_path(program: Program, instead: str | None) -> str | None:
    """Return the path of the script, or of `instead` where given; None for modules and commands."""
    target = instead
    if target is None:
        target = program.target if program.kind is ScriptKind.FILE else None
    return os.path.join(program.cwd, target) if target else None


PROGRESS_EVERY_S = 2.0
_STACKS_S = 0.5
_MAX_VALUE = 200


def network_facts(
    survey: int, ports: tuple[int, ...], environment: Mapping[str, str], local_addr: str | None
) -> part_messages.NetworkFacts:
    """Return this node's interfaces, and what the user has set himself.

    With `local_addr`, the address that the user gives for this node, list only its interface.
    """
    interfaces = own_interfaces()
    if local_addr is not None:
        interfaces = tuple(i for i in interfaces if i.address == local_addr) or interfaces
    return part_messages.NetworkFacts(
        survey=survey,
        ports=ports,
        interfaces=interfaces,
        names=link_names(),
        variables={
            name: environment[name][:_MAX_VALUE]
            for name in INTERFACE_VARIABLES
            if environment.get(name)
        },
    )


class Inquiries(AgentPart):
    """Answers requests of the head and, through it, of clients."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._link, self._spawners, self._options = agent.link, agent.spawners, agent.options
        self.facts = FactsServer(self._link.send)
        self._folder, self._living = agent.folder, agent.attempts.living
        self._probe: NetworkProbe | None = None
        self._execs: Execs | None = None

    def take(self, message: messages.Message) -> bool:
        """Handle a request of the head; return False for other messages."""
        match message:
            case part_messages.AskFacts():
                if self.agent.welcome is not None:
                    run_dir = self._options.run_directory(self.agent.welcome.run_id)
                    spawners = self._spawners
                    self.facts.take(message, spawners.program, spawners.environment, run_dir)
            case (
                part_messages.AskNetwork() | part_messages.ProbeNetwork() | part_messages.EndProbe()
            ):
                self._take_survey(message)
            case part_messages.TakeStacks():
                self.agent.spawn(self._take_stacks(message))
            case _ if isinstance(message, part_messages.FromExecClient):
                self._take_exec(message)
            case _:
                return False
        return True

    def take_torch(self, found: Mapping[str, Any]) -> None:
        """Record the spawner's report on the torch that it imports."""
        self.facts.take_torch(found)

    def waiting(self, attempt: int, workers: list[tuple[int, int]]) -> set[int]:
        """Return the ranks whose stacks show a wait for others; without an answer, a rank works."""
        from torchmuster.launcher.facts.stacks import RankActivity, judge
        from torchmuster.launcher.node.stacks import take_stacks

        found = take_stacks(self._folder, attempt, workers, _STACKS_S)
        return {
            one.rank
            for one in found
            if judge(one.text, state=one.state, source=one.source).doing is RankActivity.WAITS
        }

    # Before the start.

    def _take_survey(
        self,
        message: part_messages.AskNetwork | part_messages.ProbeNetwork | part_messages.EndProbe,
    ) -> None:
        """Report this node's networks, probe other nodes, or end the probe."""
        from torchmuster.launcher.node.probe import NetworkProbe

        if isinstance(message, part_messages.AskNetwork):
            self.close()
            head = self._options.head
            secrets = (head.secret, head.open_secret)
            self._probe = NetworkProbe(message.survey, secrets, self._link.send)
            ports = self._probe.open()
            environment, own = self._spawners.environment, self._options.local_addr
            self._link.send(network_facts(message.survey, ports, environment, own))
        elif self._probe is None or self._probe.survey != message.survey:
            return
        elif isinstance(message, part_messages.ProbeNetwork):
            self._probe.begin(message)
        else:
            self.close()

    def close(self) -> None:
        """End the probe of networks."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    # While workers run.

    async def serve(self) -> None:
        """Report the workers' progress every two seconds."""
        reader: ProgressReader | None = None
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            attempt = self._living()
            if attempt is None or not attempt.running or self._link.channel is None:
                continue
            if reader is None or reader.attempt != attempt.attempt:
                reader = ProgressReader(self._folder, attempt.attempt, self._gpus_of(attempt))
            ranks = await asyncio.to_thread(reader.read, attempt.running)
            if attempt is self._living():
                self._link.send(part_messages.Progress(attempt=attempt.attempt, ranks=ranks))

    def _gpus_of(self, attempt: NodeAttempt) -> dict[int, str]:
        """Return the GPU of each rank: among the visible ones, the one at its local rank."""
        found = {}
        for rank in attempt.ranks:
            worker = attempt.environment_of(rank)
            environment = worker_environment(self._spawners.environment, worker)
            ids, local_rank = visible_gpus(environment), int(environment["LOCAL_RANK"])
            if local_rank < len(ids):
                found[rank] = ids[local_rank]
        return found

    async def _take_stacks(self, order: part_messages.TakeStacks) -> None:
        """Send the stacks of this node's ranks."""
        from torchmuster.launcher.node.stacks import pieces, take_stacks

        attempt = self._living()
        running = attempt.running if attempt is not None else []
        logs = {rank: attempt.log_of(rank) for rank, _ in running} if attempt is not None else {}
        stacks = await asyncio.to_thread(
            take_stacks, self._folder, order.attempt, running, logs=logs
        )
        for piece, is_last in pieces(stacks):
            self._link.send(
                part_messages.Stacks(number=order.number, stacks=piece, is_last=is_last)
            )

    def _take_exec(self, message: part_messages.FromExecClient) -> None:
        """Start a command next to a rank, or pass a message on to one."""
        from torchmuster.launcher.node.exec import Execs

        if self._link.channel is not None and self._link.channel.is_open:
            if isinstance(message, part_messages.ExecStart):
                self._link.send(refuse_unproved(message))
            return
        if isinstance(message, part_messages.ExecStart) and message.forks_remote:
            return  # of a session
        if self._execs is None:
            self._execs = Execs(self._options.host, self._link.send)
        attempt, target = self._living(), None
        if attempt is not None and isinstance(message, part_messages.ExecStart):
            ranks = attempt.order.ranks
            rank = wanted_rank(message, ranks.first_rank, ranks.num_workers)
            pid = dict(attempt.running).get(rank)
            if pid is not None:
                worker = attempt.environment_of(rank)
                every = worker_environment(self._spawners.environment, worker)
                of_rank = message.task.startswith("rank ")
                message = debugger_order(message, worker, rank)
                target = rank_target(pid, node_environment(every, of_rank))
        self._execs.take(message, target)

    def end_attempt(self) -> None:
        """End the commands next to the ranks, because the attempt has ended."""
        if self._execs is not None:
            self._execs.end_all("the attempt has ended")
