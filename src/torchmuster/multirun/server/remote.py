"""Lets a remote end have its agents forked by the server of its node: a session's, or a pod's.

A pod's fork server opens when torch is imported there (`kubernetes/node/warm.py`). It only saves time:
without it, agents are started as processes.
"""

import contextlib
import json
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torchmuster.core import proc
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.node.options import AgentOrder
from torchmuster.errors import ChannelError
from torchmuster.launcher.net import remote_messages as messages
from torchmuster.multirun.server.call import SessionAgent, ask, connect_to_server, send_order
from torchmuster.multirun.server.messages import (
    AskServerState,
    EndSession,
    NodeEnvironment,
    SessionServerState,
    fork_order,
)

WARM_VARIABLE = (
    "MUSTER_WARM"  # of the calls to a pod: the process that imports there, and its folder
)
WARM_PLACE = 0
_WARM_S = 120.0  # importing torch from a slow disk
_LOOK_S = 0.02


class RemoteForkServer:
    """The server of this node.

    Attributes:
        node: What the node has given to the server.
        say: Tells the user why a start takes longer.
        renewal: The beginning of that message, before the reason.
    """

    renewal = "the session imports its modules again"

    def __init__(self, session: RunDir, place: int, node: NodeEnvironment) -> None:
        self.node = node
        self.say: Callable[[str], None] = lambda _: None
        self._session, self._place = session, place

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the variables that agents get."""
        return self.node.environment

    def wait_open(self) -> bool:
        """Wait until the server is open; return whether it can fork agents."""
        return True

    def state(self) -> messages.SessionStatus:
        """Ask the server for its state.

        Raises:
            ChannelError: The server does not answer.
        """
        state = ask(self._session, self._place, AskServerState())
        if not isinstance(state, SessionServerState):
            raise ChannelError("the server does not say how it is")
        return messages.SessionStatus(**codec.to_plain(state))

    def fork(
        self, order: AgentOrder, environment: Mapping[str, str], fds: Sequence[int]
    ) -> SessionAgent:
        """Ask the server for an agent; `fds` are its lifeline and the head's socket.

        Raises:
            ChannelError: The server does not answer.
        """
        run_dir = RunDir(order.run_dir)
        with open(run_dir.plan) as file:
            plan = codec.from_plain(RunPlan, json.load(file))
        node = self.node
        if node.python and (plan.node_setup.python_follows or plan.program.python == node.asked):
            plan = replace(plan, program=replace(plan.program, python=node.python))
        variables = {**environment, **node.variables(_of_the_client(run_dir))}
        line = connect_to_server(self._session, self._place)
        send_order(line, fork_order(plan, order, variables), [1, 2, *fds])
        agent = SessionAgent(line, plan.session or "")
        agent.on_renewal = lambda why: self.say(f"{self.renewal}: {why}")
        return agent


def _of_the_client(run_dir: RunDir) -> dict[str, str]:
    """Return the variables that the client has left for the nodes of its job, if any."""
    if not os.path.exists(run_dir.environment):
        return {}
    with open(run_dir.environment) as file:
        return dict(json.load(file))


class PodForkServer(RemoteForkServer):
    """The fork server of a run's pod, which may still be importing, or may have gone."""

    renewal = "torch is imported again in this pod"

    def __init__(self, where: str) -> None:
        pid, _, folder = where.partition(" ")
        # A site's setup lines and interpreter are for sessions: a pod that needs them has no fork server.
        pod = NodeEnvironment(asked=(), python=(), environment=dict(os.environ), site_names=())
        super().__init__(RunDir(folder), WARM_PLACE, pod)
        self._pid = int(pid)

    def wait_open(self) -> bool:
        """Wait until torch is imported; return whether agents can be forked from that process."""
        deadline = time.monotonic() + _WARM_S
        while proc.is_running(self._pid) and time.monotonic() < deadline:
            with contextlib.suppress(ChannelError):
                if not self.state().problem:
                    return True
                self._end()  # it would hold memory for nothing
                return False
            select.select([], [], [], _LOOK_S)
        return False

    def _end(self) -> None:
        with contextlib.suppress(ChannelError):
            ask(self._session, self._place, EndSession(why="it is of no use"))


def pod_fork_server() -> PodForkServer | None:
    """Return the fork server of this pod; None if the pod imports nothing in advance."""
    where = os.environ.get(WARM_VARIABLE)
    return PodForkServer(where) if where is not None else None


def serve_forked_remote(session: RunDir, place: int, node: NodeEnvironment) -> None:
    """Serve the owner of a run in a session, in a fork of the server, which also forks the agents."""
    from torchmuster.launcher.net.remote_messages import FrameWriter
    from torchmuster.launcher.node.remote.loader import num_gpus
    from torchmuster.launcher.node.remote.main import RemoteEnd, serve, take_streams

    incoming, outgoing = take_streams()
    writer = FrameWriter(outgoing)
    facts = messages.RemoteFacts(
        has_package=True,
        num_cpus=len(os.sched_getaffinity(0)),
        num_gpus=num_gpus(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )
    writer.send(facts)
    server = RemoteForkServer(session, place, node)
    writer.send(server.state())
    serve(RemoteEnd(writer, server), incoming)
    os._exit(0)
