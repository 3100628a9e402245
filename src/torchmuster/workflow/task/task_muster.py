"""The `muster` of tasks without another one on their PATH; its only command is `barrier`.

task-muster barrier [--name NAME] [--count N] [--rank R] [--timeout TIME]
"""

import argparse
import time

from torchmuster.core.spec.problems import parse_timeout
from torchmuster.errors import UsageError
from torchmuster.workflow.task_call import wait_at_barrier


def main(arguments: list[str]) -> int:
    """Wait at a barrier of the group.

    Raises:
        UsageError: The command is another one, or the value of an option is invalid.
        MusterError: The wait at the barrier failed.
    """
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
