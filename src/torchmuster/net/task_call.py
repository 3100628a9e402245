"""How a process of a task calls its agent and waits for the answer: blocking, from any thread.

Each call has a connection of its own, so threads and forks don't disturb one another.
"""

import contextlib
import json
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torchmuster.errors import BarrierError, BarrierTimeoutError, ChannelError, UsageError
from torchmuster.model.contract import TASK_SOCKET_VARIABLE

T = TypeVar("T")
Say = Callable[[str], None]

_MAX_LINE_BYTES = 64 << 10
_CONNECT_TIMEOUT_S = 5
# The head of the group speaks every 5 s; a little more than that is silence.
_SILENCE_S = 7.0
# The head ends a wait and knows who is missing; we only end one that nobody ends.
_PATIENCE_S = 10.0


def agent_socket() -> str | None:
    """Return where the agent of this task listens; None outside of a workflow's task."""
    return os.environ.get(TASK_SOCKET_VARIABLE) or None


def call_agent(
    request: Mapping[str, Any],
    *,
    on_message: Callable[[dict[str, Any]], T | None],
    timeout_s: float,
    on_silence: Callable[[float], None] = lambda _left_s: None,
) -> T:
    """Ask the agent of this task and hear it out.

    Args:
        request: Sent as one line of JSON.
        on_message: Gets each answer; what it returns, unless None, ends the call.
        timeout_s: The limit of the whole call, in seconds.
        on_silence: Called with the time that is left when nothing has been heard for 7 s.

    Raises:
        UsageError: This process is not part of a workflow, or the request is too large.
        ChannelError: The agent can't be reached, hangs up, or does not end the call in time.
    """
    path = agent_socket()
    if path is None:
        raise _outside()
    line = json.dumps(dict(request)).encode() + b"\n"
    if len(line) > _MAX_LINE_BYTES:
        raise UsageError(f"the call of {len(line)} bytes is longer than {_MAX_LINE_BYTES}")
    deadline_s = time.monotonic() + timeout_s
    with _connect(path) as agent:
        lines = _Lines(agent, path, deadline_s, on_silence)
        # An agent that refuses says so before it reads, and hangs up: its sentence counts.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            agent.sendall(line)
        while True:
            found = on_message(lines.next_message())
            if found is not None:
                return found


def wait_at_barrier(
    name: str = "default",
    *,
    count: int | None = None,
    rank: int | None = None,
    timeout_s: float = 600.0,
    say: Say | None = None,
) -> None:
    """Wait in the group's barrier: `torchmuster.barrier` tells the arguments and the errors.

    `say` gets a line every 5 s while it waits; by default standard error does.
    """
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise UsageError(f"{timeout_s} s is not a valid limit for a wait", fix="timeout_s=600.0")
    tell = say or _to_stderr
    head = f"barrier `{name}`"

    def on_message(message: dict[str, Any]) -> bool | None:
        kind = message.get("kind")
        if kind == "waiting":
            tell(f"{head}: {message.get('what')}; {float(message.get('left_s', 0)):.0f} s left")
            return None
        if kind == "released":
            return True
        raise _error_of(message)

    call_agent(
        {"kind": "barrier", "name": name, "count": count, "rank": rank, "timeout_s": timeout_s},
        on_message=on_message,
        timeout_s=timeout_s + _PATIENCE_S,
        on_silence=lambda left_s: tell(
            f"{head}: no word from the head of the group; {max(0.0, left_s - _PATIENCE_S):.0f} s left"
        ),
    )


def _error_of(message: Mapping[str, Any]) -> BarrierError:
    kind = BarrierTimeoutError if message.get("timed_out") else BarrierError
    return kind(
        str(message.get("what") or "the agent refused the call without a reason"),
        where=message.get("where"),
        why=message.get("why"),
        fix=message.get("fix"),
    )


@dataclass(slots=True)
class _Lines:
    """The agent's answers, one by one, with the limits of the call."""

    agent: socket.socket
    path: str
    deadline_s: float
    on_silence: Callable[[float], None]
    buffer: bytearray = field(default_factory=bytearray)

    def next_message(self) -> dict[str, Any]:
        line = self._next_line()
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ChannelError("the agent of this task gave no answer of ours", where=self.path)
        return message

    def _next_line(self) -> bytes:
        while b"\n" not in self.buffer:
            if len(self.buffer) > _MAX_LINE_BYTES:
                raise ChannelError("the agent of this task gave no answer of ours", where=self.path)
            self.buffer += self._receive()
        line, _, rest = bytes(self.buffer).partition(b"\n")
        self.buffer[:] = rest
        return line

    def _receive(self) -> bytes:
        while True:
            left_s = self.deadline_s - time.monotonic()
            if left_s <= 0:
                raise ChannelError("the agent of this task did not answer in time", where=self.path)
            self.agent.settimeout(min(left_s, _SILENCE_S))
            try:
                data = self.agent.recv(4096)
            except TimeoutError:
                self.on_silence(self.deadline_s - time.monotonic())
                continue
            except OSError as error:
                raise _hung_up(self.path, error.strerror) from error
            if not data:
                raise _hung_up(self.path, None)
            return data


def _connect(path: str) -> socket.socket:
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Blocking with a limit of the kernel's: one of Python's fails at once when the queue is full.
        limit = struct.pack("@ll", _CONNECT_TIMEOUT_S, 0)
        agent.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        agent.connect(path)
    except OSError as error:
        agent.close()
        raise ChannelError(
            "the agent of this task can't be reached",
            where=path,
            why=error.strerror or str(error),
        ) from error
    return agent


def _hung_up(path: str, why: str | None) -> ChannelError:
    reason = why or "it closed the connection in the middle of the call"
    return ChannelError("the agent of this task has ended", where=path, why=reason)


def _outside() -> UsageError:
    return UsageError(
        "this process is not part of a workflow's task, so it has no group to wait for",
        why=f"{TASK_SOCKET_VARIABLE} is not set",
        fix="start it by `muster submit`; in a training script, use torch.distributed.barrier()",
    )


def _to_stderr(line: str) -> None:
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)
