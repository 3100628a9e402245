"""The errors of the Python API, in the four parts that every error of torchmuster has."""

from torchmuster.core.model.failure import WorkerEnd
from torchmuster.core.model.text import render_report, report_of_error
from torchmuster.core.model.verdict import Result
from torchmuster.errors import MusterError


class NotLaunchedError(MusterError):
    """Nothing was started: a keyword, the function or what it holds can't be used; `str()` says all of it.

    Attributes:
        others: More problems of the same call; they are in the text, too.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        why: str | None = None,
        fix: str | None = None,
        others: "tuple[NotLaunchedError, ...]" = (),
    ) -> None:
        super().__init__(what, where=where, why=why, fix=fix)
        self.others = others

    def __str__(self) -> str:
        """Return all parts as lines."""
        return "\n".join(_text(error) for error in (self, *self.others))


class Interrupted(KeyboardInterrupt):
    """An interrupt of a wait, which says what becomes of the run."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows."""
        return [str(self)]


class RunFailed(MusterError):  # noqa: N818 - the name of the public API
    """A run did not succeed.

    Attributes:
        run_id: Of the run.
        state: `failed`, `cancelled`, `lost`, `timed out` or another final state.
        exit_code: As `muster run` would have ended.
        rank: The rank whose failure came first; None where no rank is to blame.
        node: The node of that rank.
        traceback: Python's of that rank, as text; empty where it raised nothing.
        cause: What went wrong, in one sentence.
        hint: The cure; None when unknown.
    """

    def __init__(self, run_id: str, result: Result | None, state: str) -> None:
        report = result.report if result is not None else None
        what = report.error if report is not None else f"the run {run_id} ended as {state}"
        super().__init__(
            what,
            where=report.at if report is not None else None,
            why="\n".join(report.because) if report is not None else None,
            fix=report.hint if report is not None else f"muster status {run_id}",
        )
        end: WorkerEnd | None = result.cause if result is not None else None
        error = end.error if end is not None else None
        self.run_id, self.state = run_id, state
        self.exit_code = result.exit_code if result is not None else 1
        self.rank = end.rank if end is not None and end.rank >= 0 else None
        self.node = end.node if end is not None else None
        self.traceback = error.traceback if error is not None else ""
        self.cause = what
        self.hint = self.fix

    def __str__(self) -> str:
        """Return all parts as lines."""
        return _text(self)


def _text(error: MusterError) -> str:
    return render_report(report_of_error(error)).rstrip("\n").removeprefix("error: ")


def read_errors(text: str) -> list[NotLaunchedError]:
    """Return the errors that a command has printed, without what it said before them."""
    found: list[dict[str, list[str]]] = []
    part: list[str] = []
    for line in text.splitlines():
        name, colon, rest = line.strip().partition(": ")
        begins = bool(colon) and not line.startswith("    ")
        if begins and name == "error":
            found.append({"error": (part := [rest])})
        elif begins and name in ("at", "because", "hint") and found:
            found[-1][name] = part = [rest]
        elif line.startswith("    "):
            part.append(line[4:])
    return [
        NotLaunchedError(
            "\n".join(parts["error"]),
            where=_joined(parts.get("at")),
            why=_joined(parts.get("because")),
            fix=_joined(parts.get("hint")),
        )
        for parts in found
    ]


def _joined(lines: list[str] | None) -> str | None:
    return "\n".join(lines) if lines else None
