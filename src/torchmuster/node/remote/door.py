"""How a remote end has its agents forked by the door of its node: the host is held by a session."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torchmuster.errors import ChannelError
from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.plan import RunPlan
from torchmuster.net import remote_messages as messages
from torchmuster.node.door.call import DoorAgent, ask, call_door, send_order
from torchmuster.node.door.messages import AskDoor, DoorNode, DoorState
from torchmuster.node.door.order import fork_order
from torchmuster.node.options import AgentOrder


class RemoteDoor:
    """The door of this node.

    Attributes:
        node: What the node gave to it.
        say: Tells the user why a start takes longer.
    """

    def __init__(self, session: RunDir, place: int, node: DoorNode) -> None:
        self.node = node
        self.say: Callable[[str], None] = lambda _: None
        self._session, self._place = session, place

    def state(self) -> messages.SessionTold:
        """Return how it is.

        Raises:
            ChannelError: It does not answer.
        """
        state = ask(self._session, self._place, AskDoor())
        if not isinstance(state, DoorState):
            raise ChannelError("the door does not say how it is")
        return messages.SessionTold(**codec.to_plain(state))

    def fork(
        self, order: AgentOrder, environment: Mapping[str, str], fds: Sequence[int]
    ) -> DoorAgent:
        """Ask for an agent with these descriptors: its lifeline, and the head's socket.

        Raises:
            ChannelError: The door does not answer.
        """
        run_dir = RunDir(order.run_dir)
        with open(run_dir.plan) as file:
            plan = codec.from_plain(RunPlan, json.load(file))
        if plan.node_setup.python_follows or plan.program.python == self.node.asked:
            plan = replace(plan, program=replace(plan.program, python=self.node.python))
        variables = {**environment, **self.node.variables(_of_the_client(run_dir))}
        line = call_door(self._session, self._place)
        send_order(line, fork_order(plan, order, variables), [1, 2, *fds])
        agent = DoorAgent(line, plan.session or "")
        agent.on_renewal = lambda why: self.say(f"the session imports its modules again: {why}")
        return agent


def _of_the_client(run_dir: RunDir) -> dict[str, str]:
    """Return the variables that the client has left for the nodes of its job; none where it left none."""
    if not os.path.exists(run_dir.environment):
        return {}
    with open(run_dir.environment) as file:
        return dict(json.load(file))
