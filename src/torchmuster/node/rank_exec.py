"""The agent's part in `muster exec` and a training run: a command beside a rank, with the rank's own variables.

A forked worker's /proc/PID/environ is its spawner's, so the launcher gets the variables from us, in its environment.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torchmuster import proc
from torchmuster.model import contract
from torchmuster.net import messages
from torchmuster.node.launcher_ranks import VariableChange


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTarget:
    """A worker to be entered; its launcher knows when it started, so that no other process is taken for it."""

    pid: int
    worker_ticks: int
    environment: Mapping[str, str]

    def has_begun(self) -> bool:
        """Say that it can be entered: a worker has no view of its own to make."""
        return True

    def poll(self) -> int | None:
        """Return -1 when the worker has ended; its status is its parent's."""
        return None if proc.is_running(self.pid) else -1


def rank_target(pid: int, environment: Mapping[str, str]) -> RankTarget | None:
    """Return the worker of this number; None when it has ended."""
    facts = proc.read_process(pid)
    if facts is None or not facts.can_run:
        return None
    return RankTarget(pid=pid, worker_ticks=facts.start_ticks, environment=environment)


def refuse_unproved(start: messages.ExecStart) -> messages.ExecRefused:
    """Return the answer to a head that has not proved who it is: it gets no command run."""
    return messages.ExecRefused(
        exec_id=start.exec_id,
        what="this node has no common key with the head, so it runs no commands for it",
        fix="give all nodes the same key: `--rdzv_conf secret_file=FILE`",
    )


def named_program(
    start: messages.ExecStart, worker: VariableChange, rank: int
) -> messages.ExecStart:
    """Return the order with our own program as its command, where the debugger of a rank is meant."""
    if not start.debugger:
        return start
    path = contract.debugger_socket(worker.values[contract.SOCKET_VARIABLE], rank)
    return replace(start, argv=tuple(proc.node_program("debugger", path)), tty=False)


def wanted_rank(start: messages.ExecStart, first_rank: int, num_workers: int) -> int:
    """Return the rank that a client has named; the first of the node for `node n2`."""
    kind, _, name = start.task.partition(" ")
    if kind == "rank" and name.isdecimal() and 0 <= int(name) - first_rank < num_workers:
        return int(name)
    return first_rank


def node_environment(environment: Mapping[str, str], rank: bool) -> dict[str, str]:
    """Return the variables for a command: without those of one rank when a whole node was named."""
    own = ("RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_ERROR_FILE")
    return {name: value for name, value in environment.items() if rank or name not in own}


def whole_environment(base: Mapping[str, str], worker: VariableChange) -> dict[str, str]:
    """Return what a worker has: our own variables, the job's, and those of its rank."""
    every = {**os.environ, **base, **worker.values}
    return {name: value for name, value in every.items() if name not in worker.removed}
