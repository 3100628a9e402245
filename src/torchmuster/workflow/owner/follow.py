"""Own a prepared workflow to its end, with output to a terminal or a log."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchmuster.core import plugs
from torchmuster.core.files.layout import RunDir
from torchmuster.core.files.terminal import TerminalVoice
from torchmuster.core.model.verdict import WorkflowResult
from torchmuster.core.node.kernel import visible_gpus
from torchmuster.core.owner.session import EarlyStop, note_on_session
from torchmuster.errors import RunDirectoryError
from torchmuster.workflow.owner.capacity import this_machine
from torchmuster.workflow.owner.view import read_workflow
from torchmuster.workflow.owner.workflow import WorkflowOwner

if TYPE_CHECKING:
    from torchmuster.workflow.owner.host_capacity import HostCapacity
    from torchmuster.workflow.owner.workflow import GroupRunner


@dataclass(slots=True)
class _TaskDisplay:
    """A display that gives each task a number, because the voice identifies ranks."""

    voice: TerminalVoice
    _numbers: dict[str, int] = field(default_factory=dict)

    def say(self, sentence: str) -> None:
        self.voice.say(sentence)

    def show_task(self, task: str, stream: int, text: str, left_out: int) -> None:
        number = self._numbers.setdefault(task, len(self._numbers))
        self.voice.name_rank(number, task)
        self.voice.show(number, stream, text, left_out)


def follow_workflow(
    run_dir: RunDir,
    voice: TerminalVoice,
    hosts: "HostCapacity | None" = None,
    elsewhere: "GroupRunner | None" = None,
) -> WorkflowResult:
    """Run a prepared workflow to its end: here, on ssh hosts, or elsewhere.

    Raises:
        RunDirectoryError: The plan can't be read.
    """
    early = EarlyStop()
    plan = read_workflow(run_dir)
    if plan is None:
        raise RunDirectoryError("the plan of the workflow can't be read", where=run_dir.workflow)
    note = note_on_session(may_detach=hosts is None)
    if note is not None:
        voice.say(note)
    machine = this_machine(run_dir.path, visible_gpus())
    owner = WorkflowOwner(plan, run_dir, machine, _TaskDisplay(voice), hosts, elsewhere)
    return asyncio.run(owner.run(early))


def own_in_background(run_dir: RunDir) -> int:
    """Own a prepared workflow to its end, here or on its cluster; return its exit code."""
    voice = TerminalVoice(prefix_always=True)
    voice.start()
    places: Callable[[RunDir, TerminalVoice], GroupRunner | None] | None = None
    if os.path.exists(run_dir.site):  # else it runs on this machine, without an import
        places = plugs.find("workflow_places", "cluster")
    elsewhere = places(run_dir, voice) if places is not None else None
    result = follow_workflow(run_dir, voice, elsewhere=elsewhere)
    voice.flush(5.0)
    return result.exit_code
