"""What PBS writes into a job's comment while it waits, in sentences, and what its hosts have.

Source: OpenPBS, src/scheduler/job_info.c and constant.h; seen in version 23.06.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence

from torchmuster.engines.base import NodeQuestion
from torchmuster.engines.wait_reasons import WaitReasons, read_words

_WORDS = read_words(os.path.join(os.path.dirname(__file__), "pbs.txt"), "(?i){}")


def capacity_argv(job_id: str) -> list[list[str]]:
    """Return the commands that tell what a job asks for and what the hosts have."""
    return [["qstat", "-f", "-F", "json", job_id], ["pbsnodes", "-a"]]


def shortage(answers: Sequence[str]) -> str | None:
    """Return what the hosts have where a chunk of the job asks for more CPUs than any of them, or PBS says that it can never run."""
    job, hosts = answers if len(answers) == 2 else ("", "")
    counts = Counter(_cpus_of_hosts(hosts).values())
    select = re.search(r'"select":\s*"([^"]*)"', job)
    asked = [int(text) for text in re.findall(r"\bncpus=(\d+)", select[1] if select else "")]
    is_too_large = max(asked, default=0) > max(counts, default=0)
    if not counts or not (is_too_large or "Can Never Run" in job):
        return None
    sizes = [
        f"{counts[n]} host{'s' if counts[n] != 1 else ''} of {n} CPUs"
        for n in sorted(counts, reverse=True)
    ]
    more = f"; the job asks for {max(asked)} on one host" if is_too_large else ""
    return f"this PBS has {' and '.join(sizes)}{more}"


def _cpus_of_hosts(text: str) -> Counter[str]:
    """Return the CPUs of each host: its vnodes together, of which a chunk may take several."""
    found: Counter[str] = Counter()
    for number, block in enumerate(re.split(r"\n(?=\S)", text)):
        known = dict(re.findall(r"resources_available\.(host|ncpus) = (\S+)", block))
        if known.get("ncpus", "").isdecimal():
            found[known.get("host", str(number))] += int(known["ncpus"])
    return found


REASONS = WaitReasons(
    table=_WORDS.waits,
    capacity_argv=capacity_argv,
    shortage=shortage,
    last_words=_WORDS.ends,
    gone=_WORDS.gone,
)


def _is_lost(stdout: str, node: str) -> str | None:
    """Source: `man pbsnodes`, states; recorded from 23.06."""
    name, _, attributes = stdout.partition("\n")
    state = re.search(r"^\s+state = (\S+)", attributes, re.MULTILINE)
    if state is None or name.strip() != node or "down" not in state[1].split(","):
        return None
    return f"its state is {state[1]}"


LOST_NODE = NodeQuestion(
    argv_for=lambda _, node: [["pbsnodes", node]], is_lost=_is_lost, outlives=False
)
