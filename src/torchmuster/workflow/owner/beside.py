"""The agents of a training task on hosts of ssh: the head's here, the others through the broker of the remote end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torchmuster.core import proc
from torchmuster.core.engines.local import LocalEngine
from torchmuster.core.engines.schedulers import set_by_schedulers
from torchmuster.core.net.address import own_endpoints
from torchmuster.core.node.launcher_ranks import leave_environment
from torchmuster.errors import UsageError
from torchmuster.launcher.net.remote_messages import StartNode
from torchmuster.launcher.node.remote.proxy import BROKER_VARIABLE, HOST_VARIABLE, proxy_argv
from torchmuster.workflow.plan import TaskNode


@dataclass(kw_only=True)
class BesideEngine(LocalEngine):
    """The agents of one run on the hosts that its task was given; the first is this one.

    Attributes:
        broker: Where agents on the other hosts are asked for.
    """

    hosts: tuple[TaskNode, ...]
    broker: str
    bind_to: ClassVar[str] = "0.0.0.0"
    keeps_agents: ClassVar[bool] = False  # other hosts don't see what is written here

    def start_all(self, *, first_attempt: int = 0, restarts_spent: int = 0) -> None:
        """Start one agent on every place, the head first."""
        # What the task's file and the setup lines have set reaches the other hosts in a file.
        leave_environment(self.run_dir.environment, set_by_schedulers())
        super().start_all(first_attempt=first_attempt, restarts_spent=restarts_spent)

    def start_place(self, place: int) -> None:
        """Start an agent on another host, through a proxy here that ends with it."""
        if place >= len(self.hosts):
            return  # the task has no more hosts; the head goes on without, or waits
        host = self.hosts[place]
        request = StartNode(
            place=place,
            heads=own_endpoints(self.address[1]),
            run_dir=self.run_dir.path,
            host=host.name,
            gpus=host.gpus,
        )
        self._agents.append((place, proc.start(proxy_argv(self.broker, request))))


def task_hosts(
    nodes: Sequence[TaskNode], environment: Mapping[str, str]
) -> tuple[str, tuple[TaskNode, ...]]:
    """Return the broker and the hosts of a task, this one first; `environment` has what the remote end has set here.

    Raises:
        UsageError: This process was not started by a remote end.
    """
    broker, here = environment.get(BROKER_VARIABLE), environment.get(HOST_VARIABLE)
    if broker is None or here is None:
        names = ", ".join(node.name for node in nodes)
        raise UsageError("this is not a host of a workflow over ssh", where=names)
    others = (node for node in nodes[1:] if node.name != here)
    return broker, (TaskNode(name=here, gpus=nodes[0].gpus), *others)
