"""The head's part in `muster exec`: route messages between clients and commands on agents.

It stores routes only: the windows of both ends bound the data in flight (`net.messages`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torchmuster.core.net import messages
from torchmuster.launcher.net import part_messages

LOST = 128 + 9
Agent = TypeVar("Agent")


class Client(Protocol):
    """The connection of a client."""

    def send_nowait(self, message: messages.Message) -> None:
        """Queue a message."""


@dataclass(frozen=True, slots=True)
class _Route(Generic[Agent]):
    client: Client
    agent: Agent


class ExecRelay(Generic[Agent]):
    """Passes messages between clients and agents: those of tasks, or of the nodes of a run.

    Args:
        find: Returns the agent for the target that a client has named; None if there is none now.
        send: Sends a message to an agent, if it is connected.
        why_not: Returns what to tell a client whose target can't be entered now.
    """

    def __init__(
        self,
        find: Callable[[str], Agent | None],
        send: Callable[[Agent, messages.Message], None],
        why_not: Callable[[str], tuple[str, str | None]],
    ) -> None:
        self._find = find
        self._send = send
        self._why_not = why_not
        self._routes: dict[str, _Route[Agent]] = {}

    @property
    def num_routes(self) -> int:
        """Return the number of running commands."""
        return len(self._routes)

    def from_client(self, client: Client, message: part_messages.FromExecClient) -> None:
        """Start a client's command, or pass a message on to a command of its own."""
        exec_id = message.exec_id
        route = self._routes.get(exec_id)
        if not isinstance(message, part_messages.ExecStart):
            if route is not None and route.client is client:
                self._send(route.agent, message)
            return
        if route is not None:
            what = "this command has been started already"
            client.send_nowait(part_messages.ExecRefused(exec_id=exec_id, what=what))
        elif (agent := self._find(message.task)) is not None:
            self._routes[exec_id] = _Route(client, agent)
            self._send(agent, message)
        else:
            what, why = self._why_not(message.task)
            client.send_nowait(part_messages.ExecRefused(exec_id=exec_id, what=what, why=why))

    def client_gone(self, client: Client) -> None:
        """End the commands of a client that has disconnected."""
        for exec_id, route in list(self._routes.items()):
            if route.client is client:
                del self._routes[exec_id]
                self._send(route.agent, part_messages.ExecLeave(exec_id=exec_id))

    def from_agent(self, agent: Agent, message: part_messages.FromExecTask) -> None:
        """Pass an agent's message on to the client of the command."""
        route = self._routes.get(message.exec_id)
        if route is None or route.agent != agent:
            return
        if isinstance(message, part_messages.ExecEnded | part_messages.ExecRefused):
            del self._routes[message.exec_id]
        route.client.send_nowait(message)

    def agent_gone(self, agent: Agent, why: str) -> None:
        """End the commands of a lost agent for their clients."""
        for exec_id, route in list(self._routes.items()):
            if route.agent == agent:
                del self._routes[exec_id]
                end = part_messages.ExecEnded(exec_id=exec_id, code=LOST, why=why)
                route.client.send_nowait(end)
