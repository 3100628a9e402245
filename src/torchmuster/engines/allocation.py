"""The engine inside a job: the nodes of an allocation, an agent on each, started by the scheduler's own means.

The head's agent is a process of ours, as on one machine; the others are started with all of the head's addresses in hand.
They end when the head is gone (their lease), or with the step that they are.
"""

import contextlib
import signal
import time
from dataclasses import dataclass

from torchmuster.engines import starter
from torchmuster.engines.local import HEAD, AgentProcesses, agent_argv
from torchmuster.engines.own_job import OwnJob
from torchmuster.engines.starter import Starter
from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.model.plan import RunPlan
from torchmuster.net.address import own_addresses, own_endpoints
from torchmuster.node.door.forked import HasStatus
from torchmuster.node.options import AgentOrder


@dataclass
class AllocationEngine(AgentProcesses):
    """The agents of one run on the nodes of one job.

    Attributes:
        job: Whose nodes they are, with the way to the others.
    """

    plan: RunPlan
    run_dir: RunDir
    job: OwnJob

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
        start = starter.start(argv)
        self._starters[start.child.pid] = start
        self._agents.append((place, start.child))

    def cut_lifeline(self) -> None:
        """Let the agents end themselves and their workers, also those on other nodes that look for a lost head's successor."""
        if self._lifeline is not None and not self.holds(HEAD):
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
        return start.said() if start is not None else ()

    def kill_all(self) -> None:
        """End every agent: at the second call without asking what started it."""
        self._kills += 1
        for place, child in self._agents:
            # srun ends its step on SIGTERM; killed at once it may leave the step behind.
            gently = place != HEAD and self._kills == 1
            child.send_signal(signal.SIGTERM if gently else signal.SIGKILL)
