"""Print errors and verdicts on standard error, in colour where the terminal has it."""

import os
import sys
from collections.abc import Callable, Sequence

from torchmuster.core import plugs
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.narration import ShownOutput, shortened
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import printable, render_report, report_of_error, span
from torchmuster.core.model.verdict import Report, Result
from torchmuster.errors import MusterError

Explain = Callable[[Result, RunDir], Report | None]

_RED, _BOLD, _CYAN, _RESET = "\x1b[1;31m", "\x1b[1m", "\x1b[36m", "\x1b[0m"
_YELLOW = "\x1b[1;33m"


def uses_colour() -> bool:
    """Return whether standard error is a colour terminal."""
    return (
        sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def paint_report(report: Report, *, colour: bool) -> str:
    """Return the text of a report, coloured if `colour`."""
    text = render_report(report)
    if not colour:
        return text
    lines = text.split("\n")
    lines[0] = f"{_RED}error:{_RESET}{_BOLD}{lines[0].removeprefix('error:')}{_RESET}"
    return "\n".join(
        f"{_CYAN}hint:{_RESET}{line.removeprefix('hint:')}" if line.startswith("hint:") else line
        for line in lines
    )


def print_errors(errors: Sequence[MusterError]) -> None:
    """Print every error, one block each."""
    colour = uses_colour()
    blocks = [paint_report(report_of_error(error), colour=colour) for error in errors]
    sys.stderr.write("\n".join(blocks))


def print_warnings(warnings: Sequence[MusterError]) -> None:
    """Print every warning, in the same form as an error."""
    word = f"{_YELLOW}warning:{_RESET}" if uses_colour() else "warning:"
    for warning in warnings:
        text = render_report(report_of_error(warning)).removeprefix("error:")
        sys.stderr.write(f"{word}{text}\n")  # a blank line before what follows


def print_notes(sentences: Sequence[str]) -> None:
    """Print one line for each automatic choice."""
    for sentence in sentences:
        sys.stderr.write(f"muster: {printable(sentence)}\n")


def summary(result: Result, how_to_go_on: str | None = None) -> str:
    """Return the last line of a run.

    Args:
        result: Result of the run.
        how_to_go_on: What an unsuccessful run has saved, and how to continue it.
    """
    further = f"; {how_to_go_on}" if how_to_go_on else ""
    if result.attempts == 0 and result.state is not RunState.SUCCEEDED:
        waited = f" after {span(result.elapsed_s)}" if result.elapsed_s else ""
        return f"{result.state.value}{waited}: it never started{further}"
    attempts = f"{result.attempts} attempt{'s' if result.attempts != 1 else ''}"
    pause = f", {span(result.lost_s)} between them" if result.lost_s else ""
    logs = f", {result.logs_lost_lines} log lines lost" if result.logs_lost_lines else ""
    after = f"{result.state.value} after {span(result.elapsed_s)} ({attempts}{pause}{logs})"
    is_good = result.state is RunState.SUCCEEDED
    return f"{after}{_unsaved_end(result) if is_good else further}"


def _unsaved_end(result: Result) -> str:
    """Return a note if the end of a successful training is not saved."""
    step, saved = result.trained_step, result.saved_step
    if step is None or saved == step:
        return ""
    last = "there is no snapshot" if saved is None else f"the last snapshot is of step {saved}"
    return f"; step {step}, its end, is not saved: {last}"


def last_report(result: Result, run_dir: RunDir, shown: ShownOutput | None = None) -> Report | None:
    """Return the report at the end of a run, with evidence from its logs; None if it adds nothing.

    Args:
        result: Result of the run.
        run_dir: Run directory with its logs.
        shown: Output that the terminal has shown: a traceback is not printed twice.
    """
    if not is_worth_a_report(result):
        return None
    explained: Explain | None = plugs.find("ends", "explain")
    report = result.report if explained is None else explained(result, run_dir)
    return shortened(report, result, shown) if report is not None and shown is not None else report


def is_worth_a_report(result: Result) -> bool:
    """Return whether the verdict says more than the last line."""
    failed = result.state is not RunState.SUCCEEDED or result.exit_code != 0
    return result.report is not None and failed
