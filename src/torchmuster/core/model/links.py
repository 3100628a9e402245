"""The links of a run that is longer than one job; each link is a job or a requeue of one."""

import enum
from dataclasses import dataclass
from typing import Any

from torchmuster.core.model import codec


class ResubmitMethod(enum.Enum):
    """How the next link is started."""

    REQUEUE = "requeue"  # the scheduler starts the same job again
    SUBMIT = "submit"  # the head submits the same script again
    CHAIN = "chain"  # the client has submitted all links at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The part of a run in one job.

    Attributes:
        way: How it was started; None for the first.
        first_attempt: Number of its first attempt.
    """

    job_id: str
    way: ResubmitMethod | None = None
    first_attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The record of all links, written by the heads of the run.

    Attributes:
        most: The allowed number of links, at least 1.
        links: The links, newest last; the newest may still be queued.
        ended: Why no other link follows; None while one may.
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
        """Return the current link."""
        return self.links[-1] if self.links else None


def may_be_followed(plain: Any) -> bool:
    """Return whether `links.json` allows another link; False if it is missing or invalid."""
    try:
        links = codec.from_plain(Links, plain)
    except codec.CodecError:
        return False
    return links.ended is None and len(links.links) < links.most
