"""`--detach`: an owner in the background takes the client's place."""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import Kind, RunDir
from torchmuster.core.owner.create import write_owner
from torchmuster.errors import RunDirectoryError
from torchmuster.launcher.facts.gpu import visible_gpus

if TYPE_CHECKING:
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.kubernetes.pods.group import PodPlaces


def detach_supervisor(run_dir: RunDir) -> None:
    """Start the owner of a prepared run in a session of its own.

    Raises:
        MusterError: It can't be started.
    """
    log = os.open(run_dir.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        child = proc.start(
            [sys.executable, "-m", "torchmuster.core.owner.detach", run_dir.path],
            env=proc.own_package_environment(),
            stdout=log,
        )
    finally:
        os.close(log)
    write_owner(run_dir, child.pid)  # before we leave: `muster wait` may be called at once


def _own(path: str) -> int:
    os.dup2(1, 2)
    run_dir = RunDir(path)
    if (own := _OWNERS.get(run_dir.kind)) is not None:
        return own(run_dir)
    if os.path.exists(RunDir(os.path.join(path, "..", "..")).member_request):
        from torchmuster.kubernetes.pods.sweep_runs import own_member

        return own_member(run_dir)
    return _supervise(run_dir)


def _own_workflow(run_dir: RunDir) -> int:
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.launcher.owner.follow import follow_workflow

    voice = TerminalVoice(prefix_always=True)
    voice.start()
    result = follow_workflow(run_dir, voice, elsewhere=_cluster_of(run_dir, voice))
    voice.flush(5.0)
    return result.exit_code


def _own_sweep(run_dir: RunDir) -> int:
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.multirun.sweep.owner import follow_sweep

    voice = TerminalVoice()
    voice.start()
    result = follow_sweep(run_dir, voice)
    voice.flush(5.0)
    return result.exit_code


_OWNERS: dict[Kind | None, Callable[[RunDir], int]] = {
    Kind.WORKFLOW: _own_workflow,
    Kind.SWEEP: _own_sweep,
}


def _cluster_of(run_dir: RunDir, voice: "TerminalVoice") -> "PodPlaces | None":
    """Return the cluster on which the groups of a workflow run; None for one of this machine."""
    noted = atomic.read_json(run_dir.site)
    if not isinstance(noted, dict):
        return None
    from torchmuster.kubernetes.pods.group import PodPlaces
    from torchmuster.launcher.engines.registry import schedulers
    from torchmuster.launcher.spec.site import load_sites

    site = load_sites(os.getcwd(), os.environ, schedulers()).sites[str(noted["site"])]
    keys = tuple((str(name), str(text)) for name, text in noted["keys"].items())
    return PodPlaces(run_dir, site.model_copy(update={"own_keys": keys}), voice.say)


def _supervise(run_dir: RunDir) -> int:
    from torchmuster.core.engines.local import LocalEngine
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.owner.create import note_failed_start
    from torchmuster.core.owner.record import next_attempt, read_plan
    from torchmuster.core.owner.supervise import own_run

    plan = read_plan(run_dir)
    if plan is None:
        raise RunDirectoryError("the plan of the run can't be read", where=run_dir.plan)
    voice = TerminalVoice()
    voice.start()
    engine = LocalEngine(plan, run_dir, tuple(visible_gpus()))
    if plan.session is not None:
        from torchmuster.multirun.engine import SessionEngine
        from torchmuster.multirun.views.sessions import find_session

        with note_failed_start(run_dir):
            held = find_session(plan.session)
        if plan.engine != "local":
            from torchmuster.multirun.held import own_on_nodes

            attempt = next_attempt(run_dir)
            result = own_on_nodes(plan, run_dir, held, voice, first_attempt=attempt)
            voice.flush(5.0)
            return result.exit_code
        engine = SessionEngine(plan, run_dir, engine.gpus, session=held, say=voice.say)
    with note_failed_start(run_dir):  # a sweep starts members again
        engine.start_all(first_attempt=next_attempt(run_dir))
    result = own_run(engine, voice)
    voice.flush(5.0)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(_own(sys.argv[1]))
