"""Blocking call from a process of a task, in any thread: wait at a barrier of its group.

Each call opens its own connection, so threads and forks don't disturb one another.
"""

import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import Callable

from torchmuster.core.model.codec import CodecError
from torchmuster.core.model.contract import TASK_SOCKET_VARIABLE
from torchmuster.core.net import ipc
from torchmuster.core.net.ipc import (
    AgentAnswer,
    AskBarrier,
    BarrierReleased,
    BarrierWaits,
    CallFailed,
)
from torchmuster.errors import BarrierError, BarrierTimeoutError, ChannelError, UsageError

Say = Callable[[str], None]

# The head ends a wait, because it knows which callers are missing; this is the fallback.
_SPARE_S = 10.0


def check_in_task() -> str:
    """Return the socket of this task's agent.

    Raises:
        UsageError: This process is not part of a workflow's task.
    """
    path = os.environ.get(TASK_SOCKET_VARIABLE)
    if not path:
        raise UsageError(
            "this process is not part of a workflow's task, so it has no group to wait for",
            why=f"{TASK_SOCKET_VARIABLE} is not set",
            fix="in a training script, use torch.distributed.barrier(); elsewhere make the callers tasks of one group of a"
            " workflow, and start it by `muster submit`",
        )
    return path


def wait_at_barrier(
    name: str = "default",
    *,
    count: int | None = None,
    rank: int | None = None,
    timeout_s: float = 600.0,
    say: Say | None = None,
) -> None:
    """Wait at a barrier of the group; `torchmuster.barrier` documents the arguments and errors.

    While it waits, `say` gets a line every 5 s; the default prints to standard error.
    """
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise UsageError(f"{timeout_s} s is not a valid limit for a wait", fix="timeout_s=600.0")
    path = check_in_task()
    tell = say or _to_stderr
    head = f"barrier `{name}`"

    def on_silence(left_s: float) -> None:
        left_s = max(0.0, left_s - _SPARE_S)
        tell(f"{head}: no message from the head of the group; {left_s:.0f} s left")

    deadline_s = time.monotonic() + timeout_s + _SPARE_S
    frame = ipc.pack(AskBarrier(name=name, count=count, rank=rank, timeout_s=timeout_s))
    try:
        agent = ipc.connect(path)
    except OSError as error:
        why = error.strerror or str(error)
        what = "the agent of this task can't be reached"
        raise ChannelError(what, where=path, why=why) from error
    with agent:
        # An agent that refuses sends its reason before it reads, then hangs up: read that reason.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            agent.sendall(frame)
        while True:
            match _next_answer(agent, path, deadline_s, on_silence):
                case BarrierWaits(what=what, left_s=left_s):
                    tell(f"{head}: {what}; {left_s:.0f} s left")
                case BarrierReleased():
                    return
                case CallFailed() as failed:
                    kind = BarrierTimeoutError if failed.timed_out else BarrierError
                    raise kind(failed.what, where=failed.where, why=failed.why, fix=failed.fix)
                case _:
                    raise _invalid_answer(path)


def _next_answer(
    agent: socket.socket, path: str, deadline_s: float, on_silence: Callable[[float], None]
) -> AgentAnswer:
    try:
        return ipc.receive(agent, AgentAnswer, deadline_s, on_silence)
    except CodecError:
        raise _invalid_answer(path) from None
    except TimeoutError:
        raise ChannelError("the agent of this task did not answer in time", where=path) from None
    except (EOFError, OSError) as error:
        why = getattr(error, "strerror", None)
        why = why or "it closed the connection in the middle of the call"
        raise ChannelError("the agent of this task has ended", where=path, why=why) from error


def _invalid_answer(path: str) -> ChannelError:
    fix = "check that this process and the agent have the same version of torchmuster"
    return ChannelError("the agent of this task gave an invalid answer", where=path, fix=fix)


def _to_stderr(line: str) -> None:
    if sys.stderr is not None:
        print(line, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Be the program `task-muster`: the `muster` of tasks without another one on their PATH.

    task-muster barrier [--name NAME] [--count N] [--rank R] [--timeout TIME]

    Raises:
        UsageError: The command is another one, or the value of an option is invalid.
        MusterError: The wait at the barrier failed.
    """
    import argparse

    from torchmuster.core.spec.problems import parse_timeout

    if arguments[:1] != ["barrier"]:
        asked = " ".join(["muster", *arguments[:1]])
        raise UsageError(
            f"there is no `{asked}` on the PATH of this task",
            why="its environment has no torchmuster; what comes along is `muster barrier`",
            fix="pip install torchmuster in that environment",
        )
    parser = argparse.ArgumentParser(prog="muster barrier", allow_abbrev=False)
    parser.add_argument("--name", default="default")
    parser.add_argument("--count", "--num-nodes", "--num_nodes", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--timeout", default="10m")
    # Accepted for command lines written for `osmo_barrier.py`, but unused: the agent knows its
    # head.
    for option in ("--connect", "--port", "--secret-file"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments[1:])
    timeout_s = parse_timeout(options.timeout)
    if not timeout_s:
        where = f"--timeout {options.timeout}"
        raise UsageError("the limit is not a time above 0", where=where, fix="--timeout 10m")
    begun_s = time.monotonic()
    wait_at_barrier(options.name, count=options.count, rank=options.rank, timeout_s=timeout_s)
    took_s = time.monotonic() - begun_s
    print(f"barrier `{options.name}`: all have reached it after {took_s:.1f} s")
    return 0
