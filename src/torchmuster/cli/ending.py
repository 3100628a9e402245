"""The last lines of a command that has followed a run: the verdict, the sum, and where the results are."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchmuster.files.layout import RunDir
    from torchmuster.files.terminal import TerminalVoice
    from torchmuster.model.outcome import WorkflowResult
    from torchmuster.model.verdict import Result


def last_line(result: "Result", run_dir: "RunDir") -> str:
    """Return the last line of a run: how it ended, and how to go on if that was no success."""
    from torchmuster.model.verdict import RunState
    from torchmuster.owner.views.account import how_to_go_on, whole
    from torchmuster.ui.messages import summary

    went_well = result.state is RunState.SUCCEEDED
    return summary(whole(result, run_dir), None if went_well else how_to_go_on(run_dir, result))


def say_end(voice: "TerminalVoice", result: "Result", run_dir: "RunDir") -> int:
    """Say how a run has ended; return its exit code."""
    from torchmuster.model.verdict import RunState
    from torchmuster.owner.views.record import keep_result
    from torchmuster.ui.messages import last_report, paint_report, uses_colour

    report = last_report(result, run_dir, voice.shown)
    if report is not None:
        voice.print(paint_report(report, colour=uses_colour()))
    voice.say(last_line(result, run_dir))
    if (why := keep_result(run_dir, result)) is not None:
        voice.say(
            f"this end can't be recorded in {run_dir.path} ({why}): `muster status` won't know of it"
        )
    if result.state is RunState.SUCCEEDED and os.path.isdir(run_dir.path):
        from torchmuster.owner.views.account import what_is_left

        voice.say(what_is_left(run_dir))
    voice.flush(5.0)
    return int(result.exit_code)


def say_workflow_end(voice: "TerminalVoice", result: "WorkflowResult", run_dir: "RunDir") -> int:
    """Say how a workflow has ended; return its exit code."""
    from torchmuster.ui.messages import paint_report, uses_colour, workflow_summary

    for report in result.reports:
        voice.print(paint_report(report, colour=uses_colour()))
    voice.say(workflow_summary(result))
    if not result.state.is_failed:
        from torchmuster.owner.views.account import what_a_workflow_left

        voice.say(what_a_workflow_left(run_dir, tuple(result.groups)))
    voice.flush(5.0)
    return int(result.exit_code)
