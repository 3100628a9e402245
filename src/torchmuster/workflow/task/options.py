"""The command lines and options of a group's head and a task's agent."""

import asyncio
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torchmuster.core.files.layout import RunDir
from torchmuster.launcher.net import remote_messages as messages
from torchmuster.workflow.plan import GroupPlan, TaskPlan, WorkflowPlan

# Names of other pods: DNS learns them after the pods start, and caches failed lookups for a while.


_LIMIT_S = 60.0
_RETRY_S = 0.5
_NOTICE_AFTER_S = 3.0


async def wait_for_dns(names: Iterable[str], doing: Callable[[str], None]) -> None:
    """Wait at most a minute until all names resolve; a command reports one that it lacks."""
    loop = asyncio.get_running_loop()
    begun, has_said = loop.time(), False
    missing = set(names)
    while True:
        missing = {name for name in missing if not await _is_known(name)}
        waited_s = loop.time() - begun
        if not missing or waited_s > _LIMIT_S:
            return
        if waited_s > _NOTICE_AFTER_S and not has_said:
            has_said = True
            doing(f"waiting for DNS to know {', '.join(sorted(missing)[:4])}")
        await asyncio.sleep(_RETRY_S)


async def _is_known(name: str) -> bool:
    try:
        await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """The command line of a group's head.

    Attributes:
        listen_fd: The listening socket.
        lifeline_fd: A pipe that closes when the owner of the workflow has gone.
    """

    run_dir: str
    group: str
    listen_fd: int
    lifeline_fd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrder:
    """The command line of a task's agent.

    Attributes:
        head: The possible addresses of the group's head, each `host:port`.
        lifeline_fd: A pipe that closes when the process that started the agent has gone.
        environment: A file of variables to apply; None to keep the inherited ones.
        address: The address of this host for others, if the call to the head does not show it.
    """

    run_dir: str
    group: str
    task: str
    attempt: int
    head: tuple[str, ...]
    lifeline_fd: int | None = None
    environment: str | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkShare:
    """One task's part of a private network: namespaces to enter, and files that name the others."""

    name: str
    address: str
    hosts: bytes
    resolver: bytes | None = None
    join: dict[str, str | None] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """The options of a task's agent.

    Attributes:
        attempt: The first attempt in this working directory, whose name has its number.
        heads: Addresses of the group's head, to try in turn.
        gpus: The GPUs that the command may see; None for all that the machine shows.
        network: The task's part of a private network; None to share the machine's network.
        port_candidates: The ports to check, the same for all tasks of a group.
        keep: Folders that the command must see even if /tmp has too many entries to show all.
        socket_path: The socket on which the command's processes call the agent.
        host_name: This pod's DNS name. DNS may learn those of others late, so the command waits for
            them.
        address: The address of this host for others, if the call to the head does not show it.
    """

    plan: WorkflowPlan
    group: GroupPlan
    task: TaskPlan
    attempt: int
    run_dir: RunDir
    heads: tuple[tuple[str, int], ...]
    secret: bytes
    gpus: tuple[str, ...] | None = None
    network: NetworkShare | None = None
    port_candidates: tuple[int, ...] = ()
    keep: tuple[str, ...] = ()
    socket_path: str = ""
    address: str | None = None
    host_name: str | None = None


def remote_order(message: messages.StartTask, run_dir: str, head: str, address: str) -> TaskOrder:
    """Return the command line of a task's agent on an ssh host."""
    return TaskOrder(
        run_dir=run_dir,
        group=message.group,
        task=message.task,
        attempt=message.attempt,
        head=(head,),
        address=address,
    )
