"""What the head of a group and the agent of a task are told when they are started."""

import asyncio
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torchmuster.core.files.layout import RunDir
from torchmuster.launcher.net import remote_messages as messages
from torchmuster.workflow.plan import GroupPlan, TaskPlan, WorkflowPlan

# The wait for the names of other pods: DNS learns them some time after the pods run, and remembers for a while what it did not know.


_LIMIT_S = 60.0
_AGAIN_S = 0.5
_SAY_AFTER_S = 3.0


async def wait_for_names(names: Iterable[str], doing: Callable[[str], None]) -> None:
    """Wait until all names are known here, at most a minute: a command that needs one of them says so itself then."""
    loop = asyncio.get_running_loop()
    begun, has_said = loop.time(), False
    missing = set(names)
    while True:
        missing = {name for name in missing if not await _is_known(name)}
        waited_s = loop.time() - begun
        if not missing or waited_s > _LIMIT_S:
            return
        if waited_s > _SAY_AFTER_S and not has_said:
            has_said = True
            doing(f"waiting for DNS to know {', '.join(sorted(missing)[:4])}")
        await asyncio.sleep(_AGAIN_S)


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
        listen_fd: Its socket.
        lifeline_fd: Its end of file means that the owner of the workflow has gone.
    """

    run_dir: str
    group: str
    listen_fd: int
    lifeline_fd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrder:
    """The command line of a task's agent.

    Attributes:
        head: Where the head of the group may listen, `host:port`.
        lifeline_fd: Its end of file means that who started it has gone.
        environment: A file with the variables to take; None keeps those it was started with.
        address: Where other hosts reach this one, when the call to the head does not show it.
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
    """One task's part of a private network: namespaces to enter, and how the others are found."""

    name: str
    address: str
    hosts: bytes
    resolver: bytes | None = None
    join: dict[str, str | None] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """What the agent of a task is told when it is started.

    Attributes:
        attempt: The first attempt in this working place, whose number the place has.
        heads: Where the head of the group listens: addresses to try in turn.
        gpus: What the command may see; None: whatever the machine shows.
        network: Its part of a private network; None: it shares the machine's.
        port_candidates: All tasks of a group look at the same ports for a free one.
        keep: Folders that the command must find even where /tmp has too much to show all.
        socket_path: Where the command calls us.
        host_name: What DNS calls this pod; the names of others may come late there, and the command waits for them.
        address: Where other hosts reach this one, when the call to the head does not show it.
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
    """Return what the agent of a task is told on a host of ssh."""
    return TaskOrder(
        run_dir=run_dir,
        group=message.group,
        task=message.task,
        attempt=message.attempt,
        head=(head,),
        address=address,
    )
