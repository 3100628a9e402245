"""A run that is longer than its job: the links of its chain, each a job or a requeue of one. Pure values."""

import enum
from dataclasses import dataclass
from typing import Any

from torchmuster.model import codec


class ResubmitWay(enum.Enum):
    """How the next link comes to be."""

    REQUEUE = "requeue"  # the scheduler starts the same job again
    SUBMIT = "submit"  # the head submits the same script again
    CHAIN = "chain"  # the client has submitted all links at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One life of the run inside a job.

    Attributes:
        way: How it came to be; None for the first.
        first_attempt: The number that its first attempt gets.
    """

    job_id: str
    way: ResubmitWay | None = None
    first_attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What the heads of a run have noted, each while it was the run's.

    Attributes:
        most: How many links there may be, at least 1.
        links: The newest last; it may still wait in the queue.
        ended: Why no other follows; None while one may.
    """

    most: int = 1
    links: tuple[Link, ...] = ()
    ended: str | None = None

    @property
    def label(self) -> str:
        """Return `link 2 of 4`."""
        return f"link {max(1, len(self.links))} of {max(self.most, len(self.links))}"

    @property
    def newest(self) -> Link | None:
        """Return the link that counts."""
        return self.links[-1] if self.links else None


def may_be_followed(plain: Any) -> bool:
    """Say whether another link may follow by what `links.json` holds; None where there is none."""
    try:
        links = codec.from_plain(Links, plain)
    except codec.CodecError:
        return False
    return links.ended is None and len(links.links) < links.most
