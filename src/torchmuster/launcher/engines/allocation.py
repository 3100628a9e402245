"""The engine inside a job: the nodes of an allocation, an agent on each, started by the scheduler's own means.

The head's agent is a process of ours, as on one machine; the others are started with all of the head's addresses in hand.
They end when the head is gone (their lease), or with the step that they are.
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

# pbsdsh ends with 0 whatever its task did, and what that said goes by the hosts' daemons into the output of the job.
_TASK_FAILED = re.compile(r"^(?:\S*/)?pbsdsh: task \S+ exit status [1-9]")
_MOST_LOG_BYTES = 1 << 16
_ERROR = re.compile(r"error:|because:|not found|No such file|denied|can't open", re.IGNORECASE)
_MOST_ERRORS, _MOST_LINE = 3, 200


def _errors_of(log: str, since: int) -> tuple[str, ...]:
    """Return what the output of a job has said of errors since it had this length, but for our own lines."""
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
    """The agents of one run on the nodes of one job.

    Attributes:
        job: Whose nodes they are, with the way to the others.
        holder: Who claims the head's terms; empty where no other head can take its place.
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
        """Return the head's addresses: login nodes call them."""
        return tuple(own_addresses())

    def start_all(self, *, first_attempt: int = 0, restarts_spent: int = 0) -> None:
        """Start one agent on every place, the head first."""
        self.start_head(first_attempt=first_attempt, restarts_spent=restarts_spent)
        # pbsdsh brings no variable of the job's script, nor what `module load` has set there.
        self.job.leave_environment(self.run_dir.environment)
        for place in range(1, min(self.plan.num_places, len(self.job.nodes))):
            self.start_place(place)

    def start_head(self, *, first_attempt: int, restarts_spent: int) -> None:
        """Start the head's agent, with the newest term.

        Raises:
            HeadLostError: Another node is the head now.
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
        else:  # another node may have announced itself meanwhile
            claims.announce(self.term, self._endpoints())

    def is_deposed(self) -> bool:
        """Say whether another node is the head now; it looks at a disk."""
        if not self.holder:
            return False
        newest = Claims(self.run_dir.succession).newest()
        return newest is not None and newest.holder != self.holder

    def _endpoints(self) -> tuple[str, ...]:
        return own_endpoints(self.address[1])

    def start_place(self, place: int) -> None:
        """Start an agent on one place, first or replacement."""
        if place >= len(self.job.nodes):
            return  # the job has no more nodes; the head goes on without, or waits
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
        """Let the agents end themselves and their workers, also those on other nodes that look for a lost head's successor."""
        if self._lifeline is not None and not self.holds(self.head_place):
            with contextlib.suppress(OSError):  # then they are killed
                atomic.write_json(self.run_dir.moved, [])
        super().cut_lifeline()

    def holds(self, place: int) -> bool:
        """Say whether a start of this place may still bring an agent: one that hangs does not count."""
        now = time.monotonic()
        return any(
            p == place
            and not (child.pid in self._starters and self._starters[child.pid].is_late(now))
            for p, child in self._agents
        )

    def _end_late(self, place: int) -> None:
        """End what was to start the place's agents long ago: it hangs, or its agent is lost."""
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
        """End every agent: at the second call without asking what started it."""
        self._kills += 1
        for place, child in self._agents:
            # srun ends its step on SIGTERM; killed at once it may leave the step behind.
            gently = place != self.head_place and self._kills == 1
            child.send_signal(signal.SIGTERM if gently else signal.SIGKILL)


@dataclass
class InheritedEngine(AllocationEngine):
    """The agents of a run whose head an agent has become: that one has started us, and the others were there before.

    Attributes:
        place: That of the agent with the head.
        head_pid: Its process: our parent.
        port: Where the head listens.
    """

    place: int = HEAD
    head_pid: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.address = ("127.0.0.1", self.port)
        self.head_place = self.place
        self._told_end = False

    def start_place(self, place: int) -> None:
        """Start an agent on one place again."""
        if place != self.place:
            super().start_place(place)

    def holds(self, place: int) -> bool:
        """Say whether an agent of this place runs; who was here before us is the head's to know."""
        if place == self.place:
            return proc.is_running(self.head_pid)
        return super().holds(place)

    @property
    def head_state(self) -> str | None:
        """The state of the head's process; `X`: there is none."""
        facts = proc.read_process(self.head_pid)
        return facts.state if facts is not None else "X"

    def poll(self) -> list[AgentEnd]:
        """Reap what we have started, and see the end of the head's agent."""
        ends = super().poll()
        if not self._told_end and not proc.is_running(self.head_pid):
            self._told_end = True
            ends.append(AgentEnd(place=self.place, status=1))
        return ends

    def kill_head(self) -> None:
        """SIGKILL the head's agent: the others find another one."""
        proc.kill_quietly(self.head_pid)

    def is_deposed(self) -> bool:
        """Say whether another node has to be the head: also when our agent has ended, as we can't start one in its place."""
        return not proc.is_running(self.head_pid) or super().is_deposed()
