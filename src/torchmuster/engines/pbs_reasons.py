"""What PBS writes into a job's comment while it waits, in sentences, and what its hosts have.

Source: OpenPBS, src/scheduler/job_info.c and constant.h; seen in version 23.06.
"""

import os
import re
from collections.abc import Sequence

from torchmuster.engines.wait_reasons import WaitReasons, read_reasons

_TABLE, _ = read_reasons(os.path.join(os.path.dirname(__file__), "pbs.txt"), "(?i){}")


def capacity_argv(job_id: str) -> list[list[str]]:
    """Return the command that tells what the hosts have."""
    del job_id  # its comment has said what is too much
    return [["pbsnodes", "-a"]]


def shortage(answers: Sequence[str]) -> str | None:
    """Return what the hosts have, from `pbsnodes -a`; None where it can't be read."""
    counts: dict[int, int] = {}
    for text in re.findall(r"resources_available\.ncpus = (\d+)", answers[0] if answers else ""):
        counts[int(text)] = counts.get(int(text), 0) + 1
    if not counts:
        return None
    sizes = [
        f"{counts[n]} host{'s' if counts[n] != 1 else ''} of {n} CPUs"
        for n in sorted(counts, reverse=True)
    ]
    return f"this PBS has {' and '.join(sizes)}"


REASONS = WaitReasons(table=_TABLE, capacity_argv=capacity_argv, shortage=shortage)
