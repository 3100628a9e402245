"""Places and ranks.

A node has its place for the life of the run. The node rank is the index among the places that
are present, so a replacement gets the ranks of the node it replaces, and ranks move only when the
world's size does.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRanks:
    """The ranks of one node in one attempt: `first_rank .. first_rank + num_workers - 1`."""

    place: int
    node_rank: int
    first_rank: int
    num_workers: int


def assign_ranks(workers_by_place: Mapping[int, int]) -> dict[int, NodeRanks]:
    """Return the ranks of every place that is present, in the order of the places."""
    ranks: dict[int, NodeRanks] = {}
    first = 0
    for node_rank, place in enumerate(sorted(workers_by_place)):
        count = workers_by_place[place]
        ranks[place] = NodeRanks(
            place=place, node_rank=node_rank, first_rank=first, num_workers=count
        )
        first += count
    return ranks


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key under which n2 comes before n10."""
    words = re.findall(r"\d+|\D+", name)
    return tuple((0, int(w), "") if w.isdecimal() else (1, 0, w) for w in words)


def free_places(taken: Iterable[int], max_nodes: int) -> list[int]:
    """Return the free places below `max_nodes`, lowest first."""
    held = set(taken)
    return [place for place in range(max_nodes) if place not in held]


def name_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3` or `ranks 0-2,5`."""
    text = compress_ranks(ranks)
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"


def compress_ranks(ranks: Iterable[int]) -> str:
    """Return `0-2,5` for 0, 1, 2, 5: how messages name many ranks."""
    parts: list[str] = []
    ordered = sorted(set(ranks))
    start = 0
    for i, rank in enumerate(ordered):
        if i + 1 == len(ordered) or ordered[i + 1] != rank + 1:
            first = ordered[start]
            parts.append(str(first) if first == rank else f"{first}-{rank}")
            start = i + 1
    return ",".join(parts)
