"""The head's part in `muster exec`: which client's connection belongs to which command of which task.

It holds names only: what travels is bounded by the windows of both ends (`net.messages`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torchmuster.net import messages

LOST = 128 + 9


class Client(Protocol):
    """The connection of a client."""

    def send_nowait(self, message: messages.Message) -> None:
        """Queue a message."""


@dataclass(frozen=True, slots=True)
class _Route:
    client: Client
    task: str


class ExecRelay:
    """Passes messages on between clients and the agents of tasks.

    Args:
        to_task: Sends to the agent of a task; says whether there is one.
        why_not: Returns why a task can't be entered now, for a message.
    """

    def __init__(
        self,
        to_task: Callable[[str, messages.Message], bool],
        why_not: Callable[[str], tuple[str, str | None]],
    ) -> None:
        self._to_task = to_task
        self._why_not = why_not
        self._routes: dict[str, _Route] = {}

    @property
    def num_routes(self) -> int:
        """Return how many commands are known."""
        return len(self._routes)

    def from_client(self, client: Client, message: messages.FromExecClient) -> None:
        """Pass a client's message on, if the command is the client's own."""
        exec_id = message.exec_id
        route = self._routes.get(exec_id)
        if not isinstance(message, messages.ExecStart):
            if route is not None and route.client is client:
                self._to_task(route.task, message)
            return
        if route is not None:
            what = "this command has been started already"
            client.send_nowait(messages.ExecRefused(exec_id=exec_id, what=what))
        elif self._to_task(message.task, message):
            self._routes[exec_id] = _Route(client, message.task)
        else:
            what, why = self._why_not(message.task)
            client.send_nowait(messages.ExecRefused(exec_id=exec_id, what=what, why=why))

    def client_gone(self, client: Client) -> None:
        """End what a client has started."""
        for exec_id, route in list(self._routes.items()):
            if route.client is client:
                del self._routes[exec_id]
                self._to_task(route.task, messages.ExecLeave(exec_id=exec_id))

    def from_task(self, task: str, message: messages.FromExecTask) -> None:
        """Pass what a task's agent says on to the client that it is for."""
        route = self._routes.get(message.exec_id)
        if route is None or route.task != task:
            return
        if isinstance(message, messages.ExecEnded | messages.ExecRefused):
            del self._routes[message.exec_id]
        route.client.send_nowait(message)

    def task_gone(self, task: str, why: str) -> None:
        """Tell the clients of a task that its agent is no more."""
        for exec_id, route in list(self._routes.items()):
            if route.task == task:
                del self._routes[exec_id]
                end = messages.ExecEnded(exec_id=exec_id, code=LOST, why=why)
                route.client.send_nowait(end)
