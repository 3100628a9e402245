"""Finds the rank that computed something else, from who made which batch with which digest."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One making of a batch by a rank.

    Attributes:
        batch: The rank whose batch it is.
        by: The rank that made it.
        digest: The digest of the results.
    """

    batch: int
    by: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OddRank:
    """What follows from makings.

    Attributes:
        batches: The batches with differing makings.
        odd: The one rank that differs from what others agree on; None if there are several, or no
            agreement.
        is_once: Its later makings of the same batch agreed with the others.
        against: The ranks that agree against it, on one batch.
    """

    batches: tuple[int, ...]
    odd: int | None = None
    is_once: bool = False
    against: tuple[int, ...] = ()


def judge(makings: Sequence[BatchResult], nodes: Sequence[int]) -> OddRank:
    """Return which rank is odd.

    Ranks agree on a digest if ranks of at least two nodes have it in their last making of a batch,
    and ranks of fewer nodes have any other. (In a world on one node ranks count instead of nodes.)
    Every batch in doubt needs agreement: where kernels add in a different order each time, nobody
    agrees, or several ranks are odd.

    Args:
        makings: In order of time.
        nodes: The node of each rank: a node's fault may affect all of its ranks.
    """
    voters = nodes if len(set(nodes)) > 1 else range(len(nodes))
    by_batch: dict[int, list[BatchResult]] = defaultdict(list)
    for making in makings:
        by_batch[making.batch].append(making)
    doubtful = sorted(
        batch for batch, made in by_batch.items() if len({one.digest for one in made}) > 1
    )
    odd: set[int] = set()
    is_once, against = True, tuple[int, ...]()
    for batch in doubtful:
        made = by_batch[batch]
        last = {one.by: one.digest for one in made}
        agreed = agreed_on(last, voters)
        if agreed is None:
            return OddRank(batches=tuple(doubtful))
        odd |= {one.by for one in made if one.digest != agreed}
        is_once = is_once and all(digest == agreed for digest in last.values())
        against = tuple(sorted(rank for rank, digest in last.items() if digest == agreed))
    if len(odd) != 1:
        return OddRank(batches=tuple(doubtful))
    (rank,) = odd
    others = tuple(one for one in against if one != rank)
    return OddRank(batches=tuple(doubtful), odd=rank, is_once=is_once, against=others)


def agreed_on(digests: Mapping[int, str], voters: Sequence[int]) -> str | None:
    """Return the digest that at least two voters have, and more than have any other; else None."""
    having: dict[str, set[int]] = defaultdict(set)
    for rank, digest in digests.items():
        having[digest].add(voters[rank])
    ordered = sorted(having.items(), key=lambda item: -len(item[1]))
    if not ordered or len(ordered[0][1]) < 2:
        return None
    if len(ordered) > 1 and len(ordered[1][1]) == len(ordered[0][1]):
        return None
    return ordered[0][0]


def odd_weights(digests: Sequence[str]) -> tuple[int | None, list[list[int]]]:
    """Return the one rank whose weights differ from all others', and the groups of equal ranks."""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, digest in enumerate(digests):
        groups[digest].append(rank)
    found = sorted(groups.values(), key=len, reverse=True)
    is_one = len(found) == 2 and len(found[0]) >= 2 and len(found[1]) == 1
    return (found[1][0] if is_one else None), found
