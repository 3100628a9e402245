"""The engine for a session on this machine: a local engine whose agents the servers fork."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from torchmuster.core.engines.local import HEAD, LocalEngine
from torchmuster.core.files.layout import RunDir
from torchmuster.core.node.options import AgentOrder
from torchmuster.core.proc import HasStatus
from torchmuster.errors import ChannelError
from torchmuster.multirun.server.call import (
    SessionAgent,
    connect_to_server,
    send_order,
    wait_for_server,
)
from torchmuster.multirun.server.messages import fork_order


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSession:
    """What a run in a live session needs of that session.

    Attributes:
        run_dir: The run directory of the run that is the session.
        lives: Returns whether the session is still alive.
    """

    name: str
    run_dir: RunDir
    lives: Callable[[], bool]


@dataclass
class SessionEngine(LocalEngine):
    """The agents of one run, forked by the servers of a session.

    Attributes:
        say: Tells the user why a start takes longer.
    """

    keeps_agents: ClassVar[bool] = False  # a server forks again only when all its forks have ended
    session: HeldSession = field(kw_only=True)
    say: Callable[[str], None] = lambda _: None
    _is_starting: bool = False

    def start_all(self, *, first_attempt: int = 0, restarts_spent: int = 0) -> None:
        """Start one agent in every place, the head first.

        Raises:
            UsageError: Another run is in the session.
            ChannelError: The session, or one of its nodes, has ended.
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
                if isinstance(agent, SessionAgent):
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
                line = wait_for_server(held.run_dir, place, held.lives)
            else:  # in the owner's loop: the next attempt asks a server that opens later
                line = connect_to_server(held.run_dir, place)
            send_order(line, fork, [fd for fd in fds if fd is not None])
        except ChannelError as error:
            if self._is_starting:
                raise ended(held.name, error) from error
            return SessionAgent(None, held.name, f"{error.what}: {error.why or error.where}")
        return SessionAgent(line, held.name)

    def _words_of(self, child: HasStatus) -> tuple[str, ...]:
        """Return why a server has not started an agent."""
        return child.said if isinstance(child, SessionAgent) else ()


def ended(name: str, error: ChannelError) -> ChannelError:
    """Return the error for a session that can no longer be used."""
    because = error.what if error.why is None else f"{error.what}: {error.why}"
    return ChannelError(
        f"the session {name} can't be used",
        where=error.where,
        why=because,
        fix=error.fix or f"muster session end {name}; muster session start --name {name}",
    )
