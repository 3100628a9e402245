"""Ranks held against each other: how many raised the same, who waited where, and how torchrun says that they ended."""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.events import LogEvent

_TABLE_RANK = re.compile(r"(?P<rank>\d{1,6}) \(local_rank: (?P<local>\d+)\)")
_EXIT_CODE = re.compile(r"-?\d+")
_MAX_NAMED = 8


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
