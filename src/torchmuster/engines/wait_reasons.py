"""Why a job waits, as sentences: a table for each scheduler, and what it has where a job asks for more.

Pure like the dialects: which commands to ask, and what their answers mean.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchmuster.engines.base import Refusal
from torchmuster.files.paragraphs import read_paragraphs
from torchmuster.model.job import JobView, Wait
from torchmuster.model.states import JobState

_MAY_WAIT = frozenset({JobState.PENDING, JobState.HELD})


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitReason:
    """One reason: the pattern in the scheduler's words, and ours.

    Attributes:
        patience_s: Of one that may heal, but mostly does not: how long it may stand.
    """

    pattern: str
    sentence: str
    hint: str = ""
    never: bool = False
    may_be_never: bool = False
    patience_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitReasons:
    """All reasons of one scheduler.

    Attributes:
        table: The first that fits is meant.
        capacity_argv: Commands that tell what a job asks for and what there is.
        shortage: What their answers say there is, where it is less than the job asks for; None where nothing is proven.
        parts_wait: A part of a job that runs may wait, as single pods do.
    """

    table: tuple[WaitReason, ...]
    capacity_argv: Callable[[str], list[list[str]]]
    shortage: Callable[[Sequence[str]], str | None]
    parts_wait: bool = False

    def explained(self, view: JobView) -> JobView:
        """Return the view with the meaning of its reason, where the table knows it."""
        runs_in_part = self.parts_wait and view.state is JobState.RUNNING
        if view.reason is None or not (view.state in _MAY_WAIT or runs_in_part):
            return view
        entry = self.meaning(view.reason)
        if entry is None:
            return view
        wait = Wait(
            sentence=entry.sentence,
            hint=entry.hint or None,
            never=entry.never,
            may_be_never=entry.may_be_never,
            patience_s=entry.patience_s,
        )
        return replace(view, wait=wait)

    def meaning(self, words: str) -> WaitReason | None:
        """Return what the scheduler's words mean; None where the table does not know them."""
        return next((entry for entry in self.table if re.match(entry.pattern, words)), None)


def read_reasons(path: str, form: str = "{}") -> tuple[tuple[WaitReason, ...], tuple[Refusal, ...]]:
    """Return a scheduler's reasons of waiting and its refusals, as a data file has them (`files/paragraphs.py`).

    Args:
        path: The file; its paragraphs are named `waits.NAME` or `refuses.NAME`.
        form: What the words of a reason become, as a regular expression.
    """
    waits: list[WaitReason] = []
    refusals: list[Refusal] = []
    for known in read_paragraphs(path):
        says, hint = known.one("says"), known.one("hint")
        if known.name.startswith("refuses."):
            refusals.append(Refusal(pattern=says, error=known.one("error"), hint=hint))
            continue
        patience = known.one("patience")
        waits.append(
            WaitReason(
                pattern=form.format(says),
                sentence=known.one("means"),
                hint=hint,
                never=known.one("never") == "yes",
                may_be_never=known.one("may be never") == "yes",
                patience_s=float(patience) if patience else None,
            )
        )
    return tuple(waits), tuple(refusals)


def reasons_of(dialect: object) -> WaitReasons | None:
    """Return the table of a dialect; engines of other packages may have none."""
    found = getattr(dialect, "wait_reasons", None)
    return found if isinstance(found, WaitReasons) else None
