"""Whether two processes are in different jobs of one scheduler."""

from collections.abc import Sequence


def other_job(jobs: Sequence[str], others: Sequence[str]) -> tuple[str, str] | None:
    """Return the two ids where one scheduler gave two different ones; None where nothing contradicts."""
    known = dict(text.partition("=")[::2] for text in jobs)
    for name, job in (text.partition("=")[::2] for text in others):
        if known.get(name, job) != job:
            return known[name], job
    return None
