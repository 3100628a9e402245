"""The engine of a session on this machine: its doors fork the agents, and all else is as for the local engine."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torchmuster.engines.local import HEAD, LocalEngine
from torchmuster.errors import ChannelError
from torchmuster.files.layout import RunDir
from torchmuster.model.codec import to_words
from torchmuster.model.plan import ScriptKind, StartMethod
from torchmuster.node.door import messages
from torchmuster.node.door.call import DoorAgent, call_door, send_order, wait_for_door
from torchmuster.node.door.forked import HasStatus
from torchmuster.node.environment import share_threads
from torchmuster.node.options import AgentOrder


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
        try:
            if self._is_starting:
                line = wait_for_door(held.run_dir, place, held.lives)
            else:  # within the owner's loop: a door that opens later is asked by the next attempt
                line = call_door(held.run_dir, place)
        except ChannelError as error:
            if self._is_starting:
                raise ended(held.name, error) from error
            return DoorAgent(None, held.name, f"{error.what}: {error.why or error.where}")
        fds = [1, 2, order.lifeline_fd, *([order.listen_fd] if place == HEAD else [])]
        with_head = order.listen_fd is not None
        send_order(
            line, self._order_for(order, has_head=with_head), [f for f in fds if f is not None]
        )
        return DoorAgent(line, held.name)

    def _words_of(self, child: HasStatus) -> tuple[str, ...]:
        """Return why a door has not started an agent."""
        return child.said if isinstance(child, DoorAgent) else ()

    def _order_for(self, order: AgentOrder, *, has_head: bool) -> messages.ForkAgent:
        program = self.plan.program
        environment = self._environment(order.place) or dict(os.environ)
        added = dict(environment)
        share_threads(added, self.plan.num_workers(order.place))
        added = {n: v for n, v in added.items() if environment.get(n) != v}
        added.update(self.plan.node_setup.environment)
        umask = os.umask(0o077)
        os.umask(umask)
        script = os.path.join(program.cwd, program.target)
        is_file = program.kind is ScriptKind.FILE
        return messages.ForkAgent(
            run_id=self.plan.run_id,
            arguments=tuple(to_words(replace(order, lifeline_fd=None, listen_fd=None))),
            has_head=has_head,
            environment=environment,
            added=added,
            cwd=os.getcwd(),
            umask=umask,
            kind=program.kind.value,
            target=program.target,
            folder=os.path.dirname(os.path.realpath(script)) if is_file else program.cwd,
            python=program.python,
            preload=program.preload,
            is_fresh=program.start is StartMethod.FRESH or program.call is not None,
        )


def ended(name: str, error: ChannelError) -> ChannelError:
    """Return the error of a session that can't be used any more."""
    because = error.what if error.why is None else f"{error.what}: {error.why}"
    return ChannelError(
        f"the session {name} can't be used",
        where=error.where,
        why=because,
        fix=error.fix or f"muster session end {name}; muster session start --name {name}",
    )
