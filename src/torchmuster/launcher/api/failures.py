"""Errors of the Python API, with the four parts that all of torchmuster's errors have."""

from collections.abc import Sequence

from torchmuster.core.files.layout import short_id
from torchmuster.core.model.failure import WorkerEnd
from torchmuster.core.model.text import render_report, report_of_error
from torchmuster.core.model.verdict import Result
from torchmuster.errors import MusterError


class NotLaunchedError(MusterError):
    """A call was refused and nothing was started; `str()` gives the whole report.

    Attributes:
        others: Further problems of the same call; `str()` includes them.
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
        """Return all parts, one per line."""
        return "\n".join(_text(error) for error in (self, *self.others))


def merged(errors: Sequence[NotLaunchedError]) -> NotLaunchedError:
    """Return the first of several errors, with the others in it."""
    first, *others = errors
    first.others = tuple(others)
    return first


class Interrupted(KeyboardInterrupt):
    """An interrupt of a wait; its message says what happens to the run."""

    def _render_traceback_(self) -> list[str]:
        """Return the traceback that IPython shows."""
        return [str(self)]


class RunFailed(MusterError):  # noqa: N818 - the name of the public API
    """A run ended without success.

    Attributes:
        run_id: The run's id.
        state: `failed`, `cancelled`, `lost`, `timed out` or another final state.
        exit_code: The exit code that `muster run` would return.
        rank: The rank that failed first; None where no rank is to blame.
        node: The node of that rank.
        traceback: The Python traceback of that rank; empty if it raised nothing.
        cause: What went wrong, in one sentence.
        hint: How to fix it; None when unknown.
    """

    def __init__(self, run_id: str, result: Result | None, state: str) -> None:
        report = result.report if result is not None else None
        what = report.error if report is not None else f"the run {run_id} ended as {state}"
        super().__init__(
            what,
            where=report.at if report is not None else None,
            why="\n".join(report.because) if report is not None else None,
            fix=report.hint if report is not None else f"muster status {short_id(run_id)}",
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
        self._more = report.more if report is not None else ()

    def __str__(self) -> str:
        """Return all parts, one per line."""
        return "\n".join([_text(self), *(f"  {line}" for line in self._more)])


def _text(error: MusterError) -> str:
    return render_report(report_of_error(error)).rstrip("\n").removeprefix("error: ")


def read_errors(text: str) -> list[NotLaunchedError]:
    """Parse the errors that a command printed; ignore its output before them."""
    found: list[dict[str, list[str]]] = []
    part: list[str] = []
    for line in text.splitlines():
        name, colon, rest = line.lstrip().partition(": ")
        begins = bool(colon) and not line.startswith("    ")
        if line.startswith("error: "):
            found.append({"error": (part := [rest])})
        elif begins and name in ("at", "because", "hint") and found:
            found[-1][name] = part = [rest]
        elif line.startswith("    "):
            part.append(line[4:])
    return [
        NotLaunchedError(
            "\n".join(parts["error"]),
            where="\n".join(parts.get("at", ())) or None,
            why="\n".join(parts.get("because", ())) or None,
            fix="\n".join(parts.get("hint", ())) or None,
        )
        for parts in found
    ]
