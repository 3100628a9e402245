"""Ranks held against each other: how many raised the same, who waited where, and how torchrun says that they ended."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.events import LogEvent

_TABLE_RANK = re.compile(r"(?P<rank>\d{1,6}) \(local_rank: (?P<local>\d+)\)")
_EXIT_CODE = re.compile(r"-?\d+")
_MAX_NAMED = 8
# How far a rank is in a process group, which all ranks call by one name (`PG GUID`; `PG ID` is each rank's own count):
#   [PG 0 (default_pg) Rank 1] Timeout at NCCL work: 9, last enqueued NCCL work: 9, last completed NCCL work: 8.
#   [PG ID 1 PG GUID 3(tp) Rank 1]  failure detected by watchdog at work sequence id: 9 PG status: last enqueued work: 9, ...
#   [PG ID 0 PG GUID 0 Rank 1] Received a dump signal ... Last enqueued NCCL work: 9, last completed NCCL work: 8.This is ...
# Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (createLogPrefix, the watchdog's loop,
# getNCCLWatchdogTimeoutErrorMsg), torch 2.3 to 2.8; the strings in the libraries of 2.6, 2.7, 2.8, 2.11, 2.15.
# Some releases after 2.11 print `, last started work: 9 (ALLREDUCE)` between the two numbers.
_COUNTERS = re.compile(
    r"\[PG (?:ID \d+ PG GUID )?(?P<group>[^\s(\]]+) ?(?:\((?P<named>[^)]*)\) ?)?Rank (?P<rank>\d+)\]"
    r"(?:.*? at (?:NCCL )?work(?: sequence id)?: (?P<at>\d+))?.*?\b[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d+),"
)


@dataclass(slots=True)
class GroupCounters:
    """What the ranks of a process group print of its collectives, each of which has a number.

    Attributes:
        is_of_all: It is the group of all ranks.
        enqueued: The last number that each rank has enqueued, by its rank in the job.
        waited_in: The number that a rank waited in until its timeout.
        lines: The line of each rank.
    """

    is_of_all: bool
    enqueued: dict[int, int] = field(default_factory=dict)
    waited_in: dict[int, int] = field(default_factory=dict)
    lines: dict[int, LogEvent] = field(default_factory=dict)

    @property
    def behind(self) -> list[int]:
        """The ranks that had not enqueued what others waited in."""
        first = min(self.waited_in.values(), default=-1)
        return sorted(rank for rank, number in self.enqueued.items() if number < first)


def timed_out_groups(case: Case) -> list[GroupCounters]:
    """Return the counters of the process groups in which a rank timed out, the first to time out first."""
    groups: dict[str, GroupCounters] = {}
    for event in case.events:
        found = _COUNTERS.search(event.line.text)
        if found is None:
            continue
        is_of_all = found["group"] == "0" or found["named"] == "default_pg"
        # In the prefix a rank is that of the group; only in the group of all it is that of the job.
        rank = int(found["rank"]) if is_of_all and event.who.rank is None else event.who.rank
        if rank is None:
            continue
        group = groups.setdefault(found["group"], GroupCounters(is_of_all=is_of_all))
        group.enqueued[rank] = max(int(found["enqueued"]), group.enqueued.get(rank, -1))
        group.lines.setdefault(rank, event)
        if found["at"]:
            group.waited_in.setdefault(rank, int(found["at"]))
    timed_out = [group for group in groups.values() if group.waited_in]
    first = {id(g): case.earliest(g.lines[rank] for rank in g.waited_in).line for g in timed_out}
    return sorted(timed_out, key=lambda g: (first[id(g)].when or 0.0, first[id(g)].order))


def raised_by(case: Case, event: LogEvent, events: Sequence[LogEvent]) -> str:
    """Return who raised the same as an event, if it was more than one: `all 4 ranks`, `ranks 2 and 3`, `3 processes`.

    What differs in numbers only is the same: each rank names its own file or layer.
    """
    same = [e for e in events if e.get("uncaught") and _shape(e) == _shape(event)]
    ranks = {e.who.rank for e in same if e.who.rank is not None}
    if len(ranks) > 1:
        size = size_of(case)
        return f"all {len(ranks)} ranks" if len(ranks) == size else named(ranks)
    if ranks or len({e.line.order for e in same}) < 2:
        return ""
    return f"{len(same)} processes"


def _shape(event: LogEvent) -> tuple[str, str]:
    return event.get("type"), re.sub(r"\d+", "0", event.get("message"))


def named(ranks: Iterable[int]) -> str:
    """Return `rank 3`, `ranks 2 and 3`, or the first eight of many."""
    words = [str(rank) for rank in sorted(ranks)]
    if len(words) == 1:
        return f"rank {words[0]}"
    if len(words) > _MAX_NAMED:
        return f"ranks {', '.join(words[:_MAX_NAMED])} and {len(words) - _MAX_NAMED} others"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def size_of(case: Case) -> int | None:
    """Return how many ranks the job has, as its lines tell it, or torchrun's table of the only node does."""
    return case.told_size or len(table_of_one_node(case)) or None


def table_of_one_node(case: Case) -> dict[int, int]:
    """Return the exit code of each rank, if the job had one node: what is not in torchrun's table of failures is 0.

    The last ranks may be missing from it when they ended well.
    """
    if len(case.of("root_cause_table")) != 1 or (case.num_nodes or 1) > 1:
        return {}
    codes: dict[int, int] = {}
    for row, following in pairwise(case.of("table_row", "exit_code")):
        rank = _TABLE_RANK.match(row.get("value")) if row.get("key") == "rank" else None
        code = _EXIT_CODE.match(following.get("code"))
        if rank is None or code is None or following.line.order != row.line.order + 1:
            continue
        if rank["rank"] != rank["local"]:
            return {}
        codes[int(rank["rank"])] = int(code[0])
    return {rank: codes.get(rank, 0) for rank in range(max(codes) + 1)} if codes else {}
