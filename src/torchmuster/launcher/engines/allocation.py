"""The engine inside a job: starts an agent on each of its nodes by the scheduler's own means.

The head's agent is a child process, as on one machine; the others are started with all addresses of
the head. They end when the head is gone (by their lease), or with the step that runs them.
"""

import contextlib
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.core import proc
from torchmuster.core.engines.local import HEAD, AgentEnd, AgentProcesses, agent_argv
from torchmuster.core.files import atomic
from torchmuster.core.files.claims import Claims
from torchmuster.core.files.layout import RunDir, size_of
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.net.address import own_addresses, own_endpoints
from torchmuster.core.node.options import AgentOrder
from torchmuster.core.plainfile import open_plain
from torchmuster.core.proc import HasStatus, Starter
from torchmuster.errors import HeadLostError
from torchmuster.launcher.engines.own_job import OwnJob
from torchmuster.launcher.engines.wait_reasons import reasons_of

# pbsdsh always exits with 0; the hosts' daemons write its task's errors to the job's output.
_TASK_FAILED = re.compile(r"^(?:\S*/)?pbsdsh: task \S+ exit status [1-9]")
_MOST_LOG_BYTES = 1 << 16
_ERROR = re.compile(r"error:|because:|not found|No such file|denied|can't open", re.IGNORECASE)
_MOST_ERRORS, _MOST_LINE = 3, 200


def _errors_of(log: str, since: int) -> tuple[str, ...]:
    """Return errors from a job's output after offset `since`, without our own lines."""
    try:
        with open_plain(log) as file:
            file.seek(since)
            lines = file.read(_MOST_LOG_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ()
    found = [line.strip()[:_MOST_LINE] for line in lines if _ERROR.search(line)]
    return tuple(dict.fromkeys(line for line in found if not line.startswith("muster:")))[
        :_MOST_ERRORS
    ]


@dataclass
class AllocationEngine(AgentProcesses):
    """The agents of a run on the nodes of a job.

    Attributes:
        job: The job, with the launcher for its other nodes.
        holder: The claimant of the head's terms; empty if no other head can take over.
    """

    plan: RunPlan
    run_dir: RunDir
    job: OwnJob
    holder: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._kills = 0
        self._starters: dict[int, Starter] = {}

    @property
    def addresses(self) -> tuple[str, ...]:
        """The head's addresses, which login nodes call."""
        return tuple(own_addresses())

    def start_all(self, *, first_attempt: int = 0, restarts_spent: int = 0) -> None:
        """Start an agent on every place, the head first."""
        self.start_head(first_attempt=first_attempt, restarts_spent=restarts_spent)
        # pbsdsh passes on no variables of the job's script, nor what `module load` has set there.
        self.job.leave_environment(self.run_dir.environment)
        for place in range(1, min(self.plan.num_places, len(self.job.nodes))):
            self.start_place(place)

    def start_head(self, *, first_attempt: int, restarts_spent: int) -> None:
        """Start the head's agent, with the newest term.

        Raises:
            HeadLostError: Another node has become the head.
        """
        if self.holder:
            claims = Claims(self.run_dir.succession)
            newest = claims.newest()
            if newest is None or newest.holder != self.holder:
                raise HeadLostError(f"{claims.head_node()} has become the head of this run")
            self.term = newest.number
        super().start_head(first_attempt=first_attempt, restarts_spent=restarts_spent)

    def _announce(self) -> None:
        claims = Claims(self.run_dir.succession)
        if self.term is None or not claims.has_heirs:
            super()._announce()
        else:  # another node may have announced itself already
            claims.announce(self.term, self._endpoints())

    def is_deposed(self) -> bool:
        """Return whether another node has become the head; reads the claims from disk."""
        if not self.holder:
            return False
        newest = Claims(self.run_dir.succession).newest()
        return newest is not None and newest.holder != self.holder

    def _endpoints(self) -> tuple[str, ...]:
        return own_endpoints(self.address[1])

    def start_place(self, place: int) -> None:
        """Start an agent on one place, the first or a replacement."""
        if place >= len(self.job.nodes):
            return  # the job has no more nodes; the head continues without, or waits
        node = self.job.nodes[place]
        order = AgentOrder(
            run_dir=self.run_dir.path,
            place=place,
            head=self._endpoints(),
            environment=self.run_dir.environment,
        )
        argv = self.job.argv(node, agent_argv(order))
        self._end_late(place)
        log_bytes = size_of(self.run_dir.job_log)
        start = proc.start_agent(argv, keeps_output=True)
        start.log_bytes = log_bytes
        self._starters[start.child.pid] = start
        self._agents.append((place, start.child))

    def cut_lifeline(self) -> None:
        """Let all agents end with their workers, even those that look for a new head."""
        if self._lifeline is not None and not self.holds(self.head_place):
            with contextlib.suppress(OSError):  # such agents are killed later
                atomic.write_json(self.run_dir.moved, [])
        super().cut_lifeline()

    def holds(self, place: int) -> bool:
        """Return whether a start of this place may still bring an agent; not if it hangs."""
        now = time.monotonic()
        return any(
            p == place
            and not (child.pid in self._starters and self._starters[child.pid].is_late(now))
            for p, child in self._agents
        )

    def _end_late(self, place: int) -> None:
        """Kill starts of the place's agent that are late: they hang, or their agent is lost."""
        now = time.monotonic()
        for held, child in self._agents:
            start = self._starters.get(child.pid)
            if held == place and start is not None and start.is_late(now):
                child.send_signal(signal.SIGKILL)

    def _words_of(self, child: HasStatus) -> tuple[str, ...]:
        start = self._starters.pop(child.pid, None)
        if start is None:
            return ()
        said = start.said()
        if any(_TASK_FAILED.search(line) for line in said):
            said += _errors_of(self.run_dir.job_log, start.log_bytes)
        return said

    def _says_gone(self, said: Sequence[str]) -> bool:
        reasons = reasons_of(self.job.dialect)
        pattern = reasons.gone if reasons is not None else None
        return bool(pattern) and any(re.search(str(pattern), line) for line in said)

    def kill_all(self) -> None:
        """End every agent; on the second call, kill the launchers as well."""
        self._kills += 1
        for place, child in self._agents:
            # srun ends its step on SIGTERM; killed at once, it may leave the step running.
            gently = place != self.head_place and self._kills == 1
            child.send_signal(signal.SIGTERM if gently else signal.SIGKILL)


@dataclass
class InheritedEngine(AllocationEngine):
    """The agents of a run whose head an agent has become; that agent started this owner.

    Attributes:
        place: The place of the agent with the head.
        head_pid: The process of that agent: our parent.
        port: The port on which the head listens.
    """

    place: int = HEAD
    head_pid: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.address = ("127.0.0.1", self.port)
        self.head_place = self.place
        self._reported_end = False

    def start_place(self, place: int) -> None:
        """Start an agent on one place again."""
        if place != self.place:
            super().start_place(place)

    def holds(self, place: int) -> bool:
        """Return whether an agent of this place runs: the head's, or one that we started."""
        if place == self.place:
            return proc.is_running(self.head_pid)
        return super().holds(place)

    @property
    def head_state(self) -> str | None:
        """The state of the head's process; `X` if there is none."""
        facts = proc.read_process(self.head_pid)
        return facts.state if facts is not None else "X"

    def poll(self) -> list[AgentEnd]:
        """Reap the processes that we started, and report the end of the head's agent once."""
        ends = super().poll()
        if not self._reported_end and not proc.is_running(self.head_pid):
            self._reported_end = True
            ends.append(AgentEnd(place=self.place, status=1))
        return ends

    def kill_head(self) -> None:
        """SIGKILL the head's agent; the other agents then elect another head."""
        proc.kill_quietly(self.head_pid)

    def is_deposed(self) -> bool:
        """Return whether another node is the head, or has to be: we can't restart our own agent."""
        return not proc.is_running(self.head_pid) or super().is_deposed()
