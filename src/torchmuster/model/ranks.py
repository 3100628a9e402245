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
    """The ranks of one node in one attempt: `first_rank .. first_rank + num_workers - 1`.

    Attributes:
        first_role_rank: The same among the workers of its role (torchrun's `--role`).
        role_world_size: How many workers have its role.
    """

    place: int
    node_rank: int
    first_rank: int
    num_workers: int
    first_role_rank: int
    role_world_size: int


def assign_ranks(
    workers_by_place: Mapping[int, int], roles: Mapping[int, str] | None = None
) -> dict[int, NodeRanks]:
    """Return the ranks of every place that is present, in the order of the places; without `roles` all have the same."""
    role_of = {place: (roles or {}).get(place, "") for place in workers_by_place}
    sizes: dict[str, int] = dict.fromkeys(role_of.values(), 0)
    for place, count in workers_by_place.items():
        sizes[role_of[place]] += count
    ranks: dict[int, NodeRanks] = {}
    first, first_of = 0, dict.fromkeys(sizes, 0)
    for node_rank, place in enumerate(sorted(workers_by_place)):
        count, role = workers_by_place[place], role_of[place]
        ranks[place] = NodeRanks(
            place=place,
            node_rank=node_rank,
            first_rank=first,
            num_workers=count,
            first_role_rank=first_of[role],
            role_world_size=sizes[role],
        )
        first, first_of[role] = first + count, first_of[role] + count
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
