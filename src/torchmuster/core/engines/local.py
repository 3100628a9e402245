"""The local engine: simulates nodes on this machine, each with its own agent.

It owns what it starts. When an agent dies, its orphans become ours (we are a subreaper) and are
killed before a replacement starts; when we die, the agents see the end of their lifeline.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.codec import to_arguments
from torchmuster.core.model.lines import Terminal
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.net.address import bind
from torchmuster.core.node.options import AgentOrder
from torchmuster.core.proc import HasStatus

HEAD = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnd:
    """The end of an agent, or of the command that was to start one; a negative status is a signal.

    Attributes:
        is_gone: The output says that the node is out of the job.
    """

    place: int
    status: int
    said: tuple[str, ...] = ()
    is_gone: bool = False


def agent_argv(order: AgentOrder) -> list[str]:
    """Return the command of an agent."""
    return proc.node_program("agent", *to_arguments(order))


class AgentProcesses:
    """The agents that an engine has started as our processes; `_lifeline` ends the local ones.

    Attributes:
        address: Where the head listens, as seen from this machine.
        bind_to: The address that the head binds; all of them where a survey finds out which of them
            others reach.
        terminal: The terminal that shows the run's output, if any.
        term: The head's newest term, where another node may replace it; `holder` is its claimant.
    """

    run_dir: RunDir
    head_place: int = HEAD  # differs once another agent has become the head
    bind_to: ClassVar[str] = "0.0.0.0"
    terminal: Terminal | None = None
    term: int | None = None
    holder: str = ""

    def __init__(self) -> None:
        self.address = ("127.0.0.1", 0)
        self._agents: list[tuple[int, HasStatus]] = []
        self._lifeline: tuple[int, int] | None = None
        self._any_failed = False

    keeps_agents: ClassVar[bool] = True

    def start_head(self, *, first_attempt: int, restarts_spent: int) -> None:
        """Start the agent with the head on this machine, first or as a replacement."""
        proc.become_subreaper()
        is_first = self._lifeline is None
        if is_first:  # the file of an earlier job of this run is outdated
            with contextlib.suppress(OSError):
                os.unlink(self.run_dir.moved)
        self._lifeline = self._lifeline or os.pipe2(os.O_CLOEXEC)
        listening = bind(self.bind_to, 0)
        self.address = ("127.0.0.1", int(listening.getsockname()[1]))
        with listening:
            # Our copy is closed at once: when the head dies, connections must be refused.
            self._start_here(
                HEAD,
                listen_fd=listening.fileno(),
                first_attempt=first_attempt,
                restarts_spent=restarts_spent,
            )
        if not is_first:
            self._announce()

    def _announce(self) -> None:
        """Announce the replacement head's address to the other agents."""
        atomic.write_json(self.run_dir.moved, self._endpoints())

    def _endpoints(self) -> tuple[str, ...]:
        """Return the addresses at which other agents find the head."""
        return (f"127.0.0.1:{self.address[1]}",)

    def _start_here(
        self,
        place: int,
        *,
        listen_fd: int | None = None,
        first_attempt: int = 0,
        restarts_spent: int = 0,
    ) -> None:
        if self._lifeline is None:
            raise ValueError("the head comes first")
        order = AgentOrder(
            run_dir=self.run_dir.path,
            place=place,
            head=(f"127.0.0.1:{self.address[1]}",),
            lifeline_fd=self._lifeline[0],
            terminal=self.terminal.to_word() if self.terminal is not None else None,
            listen_fd=listen_fd,
            first_attempt=first_attempt,
            restarts_spent=restarts_spent,
            term=self.term if listen_fd is not None else None,
            holder=self.holder if listen_fd is not None else "",
        )
        self._agents.append((place, self._launch(order)))

    def _launch(self, order: AgentOrder) -> HasStatus:
        fds = [fd for fd in (order.lifeline_fd, order.listen_fd) if fd is not None]
        return proc.start(agent_argv(order), env=self._environment(order.place), pass_fds=fds)

    def _environment(self, place: int) -> dict[str, str] | None:
        """Return the environment of an agent on this machine; None for ours."""
        return None

    def holds(self, place: int) -> bool:
        """Say whether an agent runs at this place."""
        return any(p == place for p, _ in self._agents)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The head's addresses for other machines: none, as it only serves this one."""
        return ()

    @property
    def head_state(self) -> str | None:
        """The state of the head's process in the process table; `X`: there is none."""
        heads = [proc.read_process(child.pid) for place, child in self._agents if place == HEAD]
        return heads[0].state if heads and heads[0] is not None else "X"

    @property
    def pids(self) -> list[int]:
        """The agents' process ids."""
        return [child.pid for _, child in self._agents]

    def poll(self) -> list[AgentEnd]:
        """Reap ended agents, and end what they left behind."""
        ends: list[AgentEnd] = []
        for place, child in list(self._agents):
            status = child.poll()
            if status is not None:
                self._agents.remove((place, child))
                said = self._words_of(child)
                is_gone = self._says_gone(said)
                ends.append(AgentEnd(place=place, status=status, said=said, is_gone=is_gone))
        self._any_failed = self._any_failed or any(end.status != 0 for end in ends)
        if self._any_failed:  # an agent that ended with 0 leaves only what may stay
            proc.end_children(frozenset(child.pid for _, child in self._agents))
        return ends

    def _says_gone(self, said: Sequence[str]) -> bool:
        """Say whether the output of a failed start says that the node is out of the job."""
        del said
        return False

    def _words_of(self, child: HasStatus) -> tuple[str, ...]:
        """Return the last lines of an ended process; local agents write to their logs instead."""
        return ()

    def kill_head(self) -> None:
        """SIGKILL the head's agent; `poll` reaps it."""
        for place, child in self._agents:
            if place == HEAD:
                child.send_signal(9)

    def has_orphans(self) -> bool:
        """Kill and reap what ended agents left behind; say whether any of it remains."""
        return proc.end_children(frozenset(child.pid for _, child in self._agents))

    def cut_lifeline(self) -> None:
        """Close the lifeline, so that the agents end their workers and themselves."""
        if self._lifeline is not None:
            for fd in self._lifeline:
                os.close(fd)
            self._lifeline = None


@dataclass
class LocalEngine(AgentProcesses):
    """The agents of one run on this machine."""

    plan: RunPlan
    run_dir: RunDir
    gpus: tuple[str, ...] = ()
    terminal: Terminal | None = None
    bind_to: ClassVar[str] = "127.0.0.1"

    def __post_init__(self) -> None:
        super().__init__()

    def start_all(self, *, first_attempt: int = 0, restarts_spent: int = 0) -> None:
        """Start one agent at every place, the head first."""
        self.start_head(first_attempt=first_attempt, restarts_spent=restarts_spent)
        for place in range(1, self.plan.num_places):
            self.start_place(place)

    def start_place(self, place: int) -> None:
        """Start an agent at a place, the first one or a replacement."""
        self._start_here(place)

    def _environment(self, place: int) -> dict[str, str] | None:
        """Assign each simulated node its own GPUs."""
        if self.plan.num_places == 1 or not self.gpus:
            return None
        first = sum(self.plan.num_workers(p) for p in range(place))
        mine = self.gpus[first : first + self.plan.num_workers(place)]
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(mine)}

    def kill_all(self) -> None:
        """SIGKILL every agent; `poll` reaps them."""
        for _, child in self._agents:
            child.send_signal(9)
