"""A head's right to start attempts, where another node may have taken its place: one term each (`docs/succession.md`)."""

import errno
from collections.abc import Callable

from torchmuster.errors import HeadLostError
from torchmuster.head.options import Office
from torchmuster.model.liveness.succession import Term

_FULL = (errno.ENOSPC, errno.EDQUOT)


def claim_attempt(
    office: Office,
    attempt: int,
    members: tuple[int, ...],
    restarts_spent: int,
    say: Callable[[str], None],
) -> None:
    """Claim the term of an attempt that is about to start.

    Args:
        office: Whose newest term it becomes.
        attempt: Its number.
        members: The places of all agents that are connected.
        restarts_spent: Until now.
        say: Tells the user.

    Raises:
        HeadLostError: Another node is the head, or nobody can know whether it is.
    """
    claim = Term(
        number=office.term + 1,
        holder=office.holder,
        place=office.place,
        node=office.node,
        members=members,
        next_attempt=attempt + 1,
        restarts_spent=restarts_spent,
    )
    try:
        is_ours = office.claims.take(claim)
    except OSError as error:
        if error.errno not in _FULL or not _is_newest(office):
            raise HeadLostError(
                "this node can't know whether it is still the head of the run",
                where=office.claims.folder,
                why=str(error),
                fix="the folder of the run has to be there, and to be writable, on all its nodes",
            ) from error
        # On a full disk nobody else can claim it either.
        say("the disk is full: until there is space, no other node can take the head's place")
        return
    if not is_ours:
        raise deposed(office)
    office.term = claim.number


def is_deposed(office: Office) -> bool:
    """Say whether another node has become the head; where that can't be seen, it shows at the next attempt."""
    try:
        newest = office.claims.newest()
    except OSError:
        return False
    return newest is not None and newest.number > office.term and newest.holder != office.holder


def deposed(office: Office) -> HeadLostError:
    """Return the error of a head whose place another one has taken."""
    where = office.claims.head_node()
    return HeadLostError(f"{where} has become the head of this run, so this one ends")


def _is_newest(office: Office) -> bool:
    try:
        # Without the file that a look makes first, which has no space: what we see may be old, but never too new.
        newest = office.claims.newest(fresh=False)
    except OSError:
        return False
    return newest is not None and newest.number == office.term
