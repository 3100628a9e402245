"""Remote ends for runs in a session, forked by the server; the session's channel has their streams.

So every client that may follow the session may also start a run in it, and needs no other access
to the node.
"""

from collections.abc import Mapping
from functools import partial

from torchmuster.core.files.layout import RunDir
from torchmuster.core.net.messages import Message
from torchmuster.core.node.agent import Agent, AgentPart
from torchmuster.core.proc import HasStatus
from torchmuster.launcher.net import part_messages
from torchmuster.launcher.node.exec import Execs, ExecTarget
from torchmuster.multirun.server.call import SessionAgent, connect_to_server, send_order
from torchmuster.multirun.server.messages import ForkRemote

_LEAVE_S = 15.0  # a remote end takes up to 10 s to end its agents


class _ForkTask:
    """A task for `Execs`, which starts commands inside of one; here the server forks them instead."""

    pid = 0
    worker_ticks: int | None = None
    environment: Mapping[str, str] | None = None

    def has_begun(self) -> bool:
        """Return True: commands can start at once."""
        return True

    def poll(self) -> int | None:
        """Return None: if the server had ended, the call to it would fail."""
        return None


class RemoteEnds(AgentPart):
    """The remote ends that the server of this node has forked."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._execs: Execs | None = None

    def take(self, message: Message) -> bool:
        """Handle a message from an authenticated client; return whether it is for a remote end."""
        if not isinstance(message, part_messages.FromExecClient):
            return False
        channel = self.agent.link.channel
        if channel is not None and channel.is_open:
            return False
        if (
            isinstance(message, part_messages.ExecStart)
            and message.forks_remote
            and self._execs is None
        ):
            options = self.agent.options
            run_dir = options.run_directory(options.plan.run_id)
            launch = partial(_launch, run_dir, options.place or 0)
            self._execs = Execs(options.host, self.agent.link.send, launch, _LEAVE_S)
        if self._execs is None or (
            isinstance(message, part_messages.ExecStart) and not message.forks_remote
        ):
            return False
        self._execs.take(message, _ForkTask())  # ignores messages about commands it does not know
        return True

    def end_attempt(self) -> None:
        """End all remote ends; their agents end with them."""
        if self._execs is not None:
            self._execs.end_all("the session has lost a node, or ends")


def _launch(
    run_dir: RunDir,
    place: int,
    order: part_messages.ExecStart,
    target: ExecTarget,
    streams: tuple[int, int, int],
) -> HasStatus:
    line = connect_to_server(run_dir, place)
    send_order(line, ForkRemote(), streams)
    return SessionAgent(line, run_dir.path)
