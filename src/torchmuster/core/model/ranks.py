"""Places and ranks, and their short forms.

A node keeps its place for the life of the run. The node rank is the index among the places that are
present, so a replacement gets the ranks of the node it replaces, and ranks change only when the
world's size does.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

# Slurm's short forms: `n[01-03,7]-ib[0-1]` for names, `8(x2),4` for numbers.


def compress_counts(counts: Iterable[int]) -> str:
    """Return `2(x2),1` for 2, 2, 1."""
    runs = [(count, len(list(same))) for count, same in groupby(counts)]
    return ",".join(f"{count}(x{length})" if length > 1 else str(count) for count, length in runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRanks:
    """The ranks of one node in one attempt: `first_rank .. first_rank + num_workers - 1`.

    Attributes:
        first_role_rank: The first rank among the workers with its role (torchrun's `--role`).
        role_world_size: Number of workers with its role.
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
    """Return the ranks of all present places, in place order; without `roles` all have the same."""
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
    """Return `0-2,5` for 0, 1, 2, 5, the form in messages."""
    parts: list[str] = []
    # In a run of numbers without a gap, number and index grow alike.
    for _, run in groupby(enumerate(sorted(set(ranks))), key=lambda pair: pair[1] - pair[0]):
        first, *rest = (rank for _, rank in run)
        parts.append(f"{first}-{rest[-1]}" if rest else str(first))
    return ",".join(parts)
