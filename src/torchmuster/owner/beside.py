"""The agents of a training task on hosts of ssh: the head's here, the others through the broker of the remote end."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchmuster import proc
from torchmuster.engines.local import LocalEngine
from torchmuster.errors import UsageError
from torchmuster.files import atomic
from torchmuster.net.address import own_addresses
from torchmuster.net.remote_messages import StartNode
from torchmuster.node.remote.proxy import BROKER_VARIABLE, HOST_VARIABLE, proxy_argv


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideHost:
    """A host of the task; `gpus` are those that it may use there, None leaves it to the host."""

    name: str
    gpus: tuple[str, ...] | None = None


@dataclass(kw_only=True)
class BesideEngine(LocalEngine):
    """The agents of one run on the hosts that its task was given; the first is this one.

    Attributes:
        broker: Where agents on the other hosts are asked for.
    """

    hosts: tuple[BesideHost, ...]
    broker: str
    bind_to: ClassVar[str] = "0.0.0.0"

    def start_all(self, *, first_attempt: int = 0, restarts_spent: int = 0) -> None:
        """Start one agent on every place, the head first."""
        # What the task's file and the setup lines have set reaches the other hosts in a file.
        atomic.write_json(self.run_dir.environment, dict(os.environ), mode=0o600)
        super().start_all(first_attempt=first_attempt, restarts_spent=restarts_spent)

    def start_place(self, place: int) -> None:
        """Start an agent on another host, through a proxy here that ends with it."""
        if place >= len(self.hosts):
            return  # the task has no more hosts; the head goes on without, or waits
        host, port = self.hosts[place], self.address[1]
        request = StartNode(
            place=place,
            heads=tuple(f"{address}:{port}" for address in own_addresses() or ["127.0.0.1"]),
            run_dir=self.run_dir.path,
            host=host.name,
            gpus=host.gpus,
        )
        self._agents.append((place, proc.start(proxy_argv(self.broker, request))))


def task_hosts(
    said: Mapping[str, Any], task: str, environment: Mapping[str, str]
) -> tuple[str, tuple[BesideHost, ...]]:
    """Return the broker and the hosts of a task, this one first.

    `said` is what the head of the group wrote into `nodes.json`, `environment` has what the remote end has set here.

    Raises:
        UsageError: This process was not started by a remote end.
    """
    broker, here = environment.get(BROKER_VARIABLE), environment.get(HOST_VARIABLE)
    if broker is None or here is None:
        raise UsageError("this is not a host of a workflow over ssh", where=f"task {task}")
    names: list[str] = said["tasks"][task]
    gpus: list[list[str]] = said["gpus"].get(task) or []
    hosts = [
        BesideHost(name=name, gpus=tuple(gpus[number]) if number < len(gpus) else None)
        for number, name in enumerate(names)
    ]
    others = [host for host in hosts[1:] if host.name != here]
    return broker, (BesideHost(name=here, gpus=hosts[0].gpus), *others)
