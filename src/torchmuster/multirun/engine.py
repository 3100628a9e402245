"""The engine of a session on this machine: its doors fork the agents, and all else is as for the local engine."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from torchmuster.core.engines.local import HEAD, LocalEngine
from torchmuster.core.files.layout import RunDir
from torchmuster.core.node.options import AgentOrder
from torchmuster.core.proc import HasStatus
from torchmuster.errors import ChannelError
from torchmuster.multirun.door.call import DoorAgent, call_door, send_order, wait_for_door
from torchmuster.multirun.door.messages import fork_order


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSession:
    """A session that lives, as far as a run in it needs it.

    Attributes:
        run_dir: Of the run that is the session.
        lives: Says whether its owner does.
    """

    name: str
    run_dir: RunDir
    lives: Callable[[], bool]


def _say_to_nobody(sentence: str) -> None:
    """Say it to nobody."""


@dataclass
class SessionEngine(LocalEngine):
    """The agents of one run, forked by the doors of a session.

    Attributes:
        say: Tells the user why a start takes longer.
    """

    keeps_agents: ClassVar[bool] = False  # a door forks again when all that it has forked is gone
    session: HeldSession = field(kw_only=True)
    say: Callable[[str], None] = _say_to_nobody
    _is_starting: bool = False

    def start_all(self, *, first_attempt: int = 0, restarts_spent: int = 0) -> None:
        """Start one agent on every place, the head first.

        Raises:
            UsageError: Another run is in the session.
            ChannelError: The session has ended, or a node of it.
        """
        self._is_starting = True
        renewed: set[str] = set()

        def tell(why: str) -> None:
            if why not in renewed:
                renewed.add(why)
                self.say(f"the session imports its modules again: {why}")

        try:
            super().start_all(first_attempt=first_attempt, restarts_spent=restarts_spent)
            for _, agent in self._agents:
                if isinstance(agent, DoorAgent):
                    agent.on_renewal = tell
                    agent.wait_started()
        except BaseException:
            self.cut_lifeline()
            raise
        finally:
            self._is_starting = False

    def _launch(self, order: AgentOrder) -> HasStatus:
        place, held = order.place, self.session
        fds = [1, 2, order.lifeline_fd, *([order.listen_fd] if place == HEAD else [])]
        environment = self._environment(order.place) or dict(os.environ)
        fork = fork_order(self.plan, order, environment)
        try:
            if self._is_starting:
                line = wait_for_door(held.run_dir, place, held.lives)
            else:  # within the owner's loop: a door that opens later is asked by the next attempt
                line = call_door(held.run_dir, place)
            send_order(line, fork, [fd for fd in fds if fd is not None])
        except ChannelError as error:
            if self._is_starting:
                raise ended(held.name, error) from error
            return DoorAgent(None, held.name, f"{error.what}: {error.why or error.where}")
        return DoorAgent(line, held.name)

    def _words_of(self, child: HasStatus) -> tuple[str, ...]:
        """Return why a door has not started an agent."""
        return child.said if isinstance(child, DoorAgent) else ()


def ended(name: str, error: ChannelError) -> ChannelError:
    """Return the error of a session that can't be used any more."""
    because = error.what if error.why is None else f"{error.what}: {error.why}"
    return ChannelError(
        f"the session {name} can't be used",
        where=error.where,
        why=because,
        fix=error.fix or f"muster session end {name}; muster session start --name {name}",
    )
