"""The agents of a training task on hosts of ssh: the head's here, the others ordered at the courier's desk."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchmuster import proc
from torchmuster.engines.local import HEAD, AgentProcesses, agent_argv
from torchmuster.errors import UsageError
from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.model.plan import RunPlan
from torchmuster.net import listener
from torchmuster.net.address import own_addresses
from torchmuster.node.remote.proxy import DESK_VARIABLE, HOST_VARIABLE, elsewhere_argv


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideHost:
    """A host of the task; `gpus` are those that it may use there, None leaves it to the host."""

    name: str
    gpus: tuple[str, ...] | None = None


@dataclass
class BesideEngine(AgentProcesses):
    """The agents of one run on the hosts that its task was given; the first is this one.

    Attributes:
        desk: Where agents on the other hosts are ordered.
    """

    plan: RunPlan
    run_dir: RunDir
    hosts: tuple[BesideHost, ...]
    desk: str
    address: tuple[str, int] = ("127.0.0.1", 0)

    def __post_init__(self) -> None:
        super().__init__()

    def start_all(self, *, first_attempt: int = 0, restarts_spent: int = 0) -> None:
        """Start one agent on every place, the head first."""
        proc.become_subreaper()
        self._lifeline = os.pipe2(os.O_CLOEXEC)
        listening = listener.bind("0.0.0.0", 0)
        self.address = ("127.0.0.1", int(listening.getsockname()[1]))
        with listening:
            argv = agent_argv(self.run_dir, HEAD, [self.address])
            argv += [f"--lifeline-fd={self._lifeline[0]}", f"--listen-fd={listening.fileno()}"]
            argv += [f"--first-attempt={first_attempt}", f"--restarts-spent={restarts_spent}"]
            child = proc.start(argv, pass_fds=[self._lifeline[0], listening.fileno()])
            self._agents.append((HEAD, child))
        # What the task's file and the setup lines have set reaches the other hosts in a file.
        atomic.write_json(self.run_dir.environment, dict(os.environ), mode=0o600)
        for place in range(1, min(self.plan.max_nodes, len(self.hosts))):
            self.start_place(place)

    def start_place(self, place: int) -> None:
        """Start an agent on one place, first or replacement."""
        if place >= len(self.hosts):
            return  # the task has no more hosts; the coordinator goes on without, or waits
        port = self.address[1]
        heads = [(address, port) for address in own_addresses()] or [self.address]
        host = self.hosts[place]
        options = {
            "run_dir": self.run_dir.path,
            "place": str(place),
            "head": ",".join(f"{address}:{number}" for address, number in heads),
        }
        gpus = None if host.gpus is None else list(host.gpus)
        request = {"kind": "node", "host": host.name, "gpus": gpus, "options": options}
        self._agents.append((place, proc.start(elsewhere_argv(self.desk, request))))

    def kill_all(self) -> None:
        """SIGKILL every agent: those elsewhere by the end of what stands for them here."""
        for _, child in self._agents:
            child.send_signal(9)


def task_hosts(
    said: Mapping[str, Any], task: str, environment: Mapping[str, str]
) -> tuple[str, tuple[BesideHost, ...]]:
    """Return the desk and the hosts of a task, this one first.

    `said` is what the head of the group wrote into `nodes.json`, `environment` has what the courier has set here.

    Raises:
        UsageError: No courier has started this process.
    """
    desk, here = environment.get(DESK_VARIABLE), environment.get(HOST_VARIABLE)
    if desk is None or here is None:
        raise UsageError("this is not a host of a workflow over ssh", where=f"task {task}")
    names: list[str] = said["tasks"][task]
    gpus: list[list[str]] = said["gpus"].get(task) or []
    hosts = [
        BesideHost(name=name, gpus=tuple(gpus[number]) if number < len(gpus) else None)
        for number, name in enumerate(names)
    ]
    others = [host for host in hosts[1:] if host.name != here]
    return desk, (BesideHost(name=here, gpus=hosts[0].gpus), *others)
