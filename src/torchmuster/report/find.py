"""Find a run and read its story, or say why that can't be done."""

import os

from torchmuster.errors import NotFoundError
from torchmuster.files.layout import RunDir
from torchmuster.owner.views.find import find_run, view_run
from torchmuster.owner.views.run_view import RunView
from torchmuster.owner.views.sweep_view import SweepRun
from torchmuster.owner.views.workflow_view import WorkflowRun
from torchmuster.report.read import owner_of, read_run_story
from torchmuster.report.story import Story
from torchmuster.report.sweep import read_sweep_story
from torchmuster.report.workflow import read_workflow_story


def find_story(word: str) -> Story:
    """Return the story of the run that a word names.

    Raises:
        NotFoundError: There is none, or its directory can't be read.
    """
    return read_story(open_run(word))


def open_run(word: str) -> RunView:
    """Return the run that a word names, after a look at whether its directory can be read at all.

    Raises:
        NotFoundError: There is none, or its directory can't be read.
    """
    if os.sep in word and os.path.isdir(word):
        path = os.path.abspath(word)
        _check_readable(path)
        run_dir = RunDir(path)
        of_kind = (run_dir.plan, run_dir.workflow, run_dir.sweep)
        if not any(map(os.path.exists, (*of_kind, run_dir.events))):
            raise NotFoundError(
                "this folder is no run directory",
                where=path,
                why="it has no plan.json, no workflow.json and no events.jsonl",
                fix="`muster ps` lists the runs",
            )
        return _understood(view_run(run_dir))
    view = find_run(word)
    _check_readable(view.run_dir.path)
    return _understood(view)


def _understood(view: RunView) -> RunView:
    if view.problem:
        raise _not_understood(view.run_dir.path, view.problem)
    return view


def _not_understood(where: str, problem: str) -> NotFoundError:
    return NotFoundError(
        "the record of this run can't be understood",
        where=where,
        why=problem,
        fix="was it written by another version of muster, or damaged? `muster explain` reads its logs",
    )


def _check_readable(path: str) -> None:
    if os.access(path, os.R_OK | os.X_OK):
        return
    raise NotFoundError(
        "the directory of this run can't be read",
        where=path,
        why=f"it belongs to {owner_of(path)}, and runs are private",
        fix="ask its owner for the page: `muster report` writes one file that can be passed on",
    )


def read_story(view: RunView) -> Story:
    """Return the story of a run, a workflow or a sweep."""
    if isinstance(view, WorkflowRun):
        return read_workflow_story(view)
    return read_sweep_story(view) if isinstance(view, SweepRun) else read_run_story(view)
