"""Start a spawner: Python itself by a pair of sockets, a wrapper command by a socket that its Python calls."""

import os
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any

from torchmuster import proc
from torchmuster.files.layout import muster_home
from torchmuster.model.liveness.lease import LEASE_S
from torchmuster.model.message import encode
from torchmuster.model.plan import Program
from torchmuster.node.door.forked import HasStatus
from torchmuster.node.spawner.link import BUFFER_BYTES, SpawnerLink, send_first
from torchmuster.node.spawner.messages import BeginSpawner, ImportsRefused, SpawnerEvent
from torchmuster.node.spawner.wrapped import SpawnerServer, WrappedLink


def start_spawner(
    program: Program,
    env: Mapping[str, str],
    socket_path: str,
    refused: ImportsRefused | None = None,
) -> tuple[proc.Child, Any]:
    """Start the job's interpreter at once; it imports torch while the agent gets ready.

    `refused` is the last word of a spawner before, which has ended by it.

    Returns the process, and the socket or the desk (`wrapped.SpawnerServer`) that `make_link` takes.

    Raises:
        MusterError: The interpreter can't be executed.
    """
    entry = os.path.join(os.path.dirname(os.path.abspath(__file__)), "entry.py")
    if not is_interpreter(program.python[0]):
        desk = SpawnerServer(
            os.path.dirname(socket_path), _config(program, socket_path, refused, wrapped=True)
        )
        words = [*program.python, entry, "spawner", desk.path, "--", *program.display()]
        return desk.start(words, env, program.cwd), desk
    ours, theirs = control_pair()
    with theirs:
        child = proc.start(
            [*program.python, entry, "spawner", str(theirs.fileno()), "--", *program.display()],
            env=env,
            cwd=program.cwd,
            pass_fds=[theirs.fileno()],
        )
    begin_spawner(ours, program, socket_path, refused)
    return child, ours


def control_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of the line between an agent and its spawner."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        ours.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    return ours, theirs


def begin_spawner(
    control: socket.socket,
    program: Program,
    socket_path: str,
    refused: ImportsRefused | None = None,
) -> None:
    """Tell a spawner what it is for."""
    send_first(control, _config(program, socket_path, refused, wrapped=False))


def is_interpreter(word: str) -> bool:
    """Say whether a command is Python itself: others (uv, conda, apptainer) may close what they inherit."""
    return (
        re.fullmatch(r"(python|pypy)[0-9.]*[a-z]*(-[a-z0-9]+)?", os.path.basename(word)) is not None
    )


def _config(
    program: Program, socket_path: str, refused: ImportsRefused | None, *, wrapped: bool
) -> bytes:
    begin = BeginSpawner(
        wrapped=wrapped,
        kind=program.kind.value,
        target=program.target,
        args=program.args,
        python=program.python,
        start=program.start.value,
        preload=program.preload,
        macros=program.macros,
        lease_s=LEASE_S,
        socket_path=socket_path,
        has_torch=program.has_torch,
        call_sha256=program.call.sha256 if program.call is not None else "",
        cache=os.path.join(muster_home(), "cache", "imports"),
        num_imports=refused.num_made if refused is not None else -1,
        imports_why=refused.why if refused is not None else "",
    )
    return encode(begin)


def make_link(
    child: HasStatus,
    control: Any,
    on_event: Callable[[SpawnerEvent], None],
    on_end: Callable[[], None],
) -> SpawnerLink:
    """Return the link to a spawner that `start_spawner` has started."""
    if isinstance(control, socket.socket):
        return SpawnerLink(child, control, on_event, on_end)
    return WrappedLink(child, control, on_event, on_end)
