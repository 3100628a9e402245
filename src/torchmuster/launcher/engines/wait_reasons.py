"""Explanations of waiting jobs: each scheduler's table, and how to detect a shortage.

Pure like the dialects: which commands to run, and what their answers mean.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchmuster.launcher.engines.base import Refusal
from torchmuster.launcher.files.paragraphs import Paragraph, read_paragraphs
from torchmuster.launcher.model.job import JobState, JobView, Wait

_MAY_WAIT = frozenset({JobState.PENDING, JobState.HELD})


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitReason:
    """A reason: a pattern for the scheduler's words, and our explanation.

    Attributes:
        patience_s: For a reason that may pass but mostly doesn't: how long it may last, in seconds.
    """

    pattern: str
    sentence: str
    hint: str = ""
    never: bool = False
    may_be_never: bool = False
    patience_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndReason:
    """What a scheduler writes into the output of a job that it ends, or answers when asked.

    Attributes:
        pattern: Matches a whole line.
        sentence: The meaning.
        kind: `limit`: the job exceeded one; `node`: it lost a node; `preempted`; `cancelled`: on
            request.
        exit_code: For a run that exceeded a limit.
    """

    pattern: str
    sentence: str
    kind: str
    hint: str = ""
    exit_code: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitReasons:
    """All reasons of one scheduler.

    Attributes:
        table: The first match counts.
        capacity_argv: Commands that show what a job asks for and what there is.
        shortage: Returns what there is if that is less than the job asks for; None if nothing is
            proven.
        parts_wait: Whether parts of a running job may wait, as single pods do.
        last_words: What it writes when it ends a job.
        gone: A pattern for its launcher's words on a node that has left the job.
    """

    table: tuple[WaitReason, ...]
    capacity_argv: Callable[[str], list[list[str]]]
    shortage: Callable[[Sequence[str]], str | None]
    parts_wait: bool = False
    last_words: tuple[EndReason, ...] = ()
    gone: str | None = None

    def explained(self, view: JobView) -> JobView:
        """Add the meaning of the view's reason, if the table has it."""
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
        """Return the meaning of the scheduler's words; None if the table lacks it."""
        return next((entry for entry in self.table if re.match(entry.pattern, words)), None)


def read_scheduler_texts(
    path: str,
    form: str,
    capacity_argv: Callable[[str], list[list[str]]],
    shortage: Callable[[Sequence[str]], str | None],
    *,
    parts_wait: bool = False,
) -> tuple[WaitReasons, tuple[Refusal, ...]]:
    """Read a scheduler's reasons and refusals from a data file (`launcher/files/paragraphs.py`).

    Its paragraphs are named by what they are: `waits.NAME`, `refuses.NAME`, `ends.NAME` for what it
    writes when it ends a job, `gone.NAME` for its words on a node that has left its job.

    Args:
        path: The file.
        form: The regular expression for a reason to wait, with `{}` for its words.
        capacity_argv: As in `WaitReasons`, as the next ones.
        shortage: See there.
        parts_wait: See there.
    """
    of_kind: dict[str, list[Paragraph]] = {}
    for known in read_paragraphs(path):
        of_kind.setdefault(known.name.partition(".")[0], []).append(known)
    reasons = WaitReasons(
        table=tuple(_wait(one, form) for one in of_kind.get("waits", ())),
        capacity_argv=capacity_argv,
        shortage=shortage,
        parts_wait=parts_wait,
        last_words=tuple(_last_word(one) for one in of_kind.get("ends", ())),
        gone="|".join(one.one("says") for one in of_kind.get("gone", ())) or None,
    )
    return reasons, tuple(_refusal(one) for one in of_kind.get("refuses", ()))


def _wait(known: Paragraph, form: str) -> WaitReason:
    patience = known.one("patience")
    return WaitReason(
        pattern=form.format(known.one("says")),
        sentence=known.one("means"),
        hint=known.one("hint"),
        never=known.one("never") == "yes",
        may_be_never=known.one("may be never") == "yes",
        patience_s=float(patience) if patience else None,
    )


def _refusal(known: Paragraph) -> Refusal:
    return Refusal(
        pattern=known.one("says"),
        error=known.one("error"),
        hint=known.one("hint"),
        is_away=known.one("away") == "yes",
    )


def _last_word(known: Paragraph) -> EndReason:
    return EndReason(
        pattern=known.one("says"),
        sentence=known.one("means"),
        kind=known.one("is"),
        hint=known.one("hint"),
        exit_code=int(known.one("exit code") or 1),
    )


def reasons_of(dialect: object) -> WaitReasons | None:
    """Return a dialect's table; engines of other packages may have none."""
    found = getattr(dialect, "wait_reasons", None)
    return found if isinstance(found, WaitReasons) else None
