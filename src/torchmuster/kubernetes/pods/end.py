"""Ending a run in pods from the client: a cancel leaves a record here, nothing on the cluster."""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.model import codec
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report
from torchmuster.core.owner.record import read_result
from torchmuster.errors import MissingRecordError, MusterError
from torchmuster.kubernetes.engine.answers import LOST_AT_END, WAITS_FOR_CLIENT, Pod
from torchmuster.kubernetes.engine.dialect import DIALECT, place_of
from torchmuster.kubernetes.pods.losses import LossNotes, LostPodRemover, explain_loss
from torchmuster.kubernetes.pods.mirror import RecordMirror, result_of_pod
from torchmuster.kubernetes.pods.reach import (
    NotAllowedError,
    PodWatch,
    RunInPods,
    ask,
    find_pod,
    forward,
    is_submitted_here,
    job_of,
    log_of,
    pod_order,
)
from torchmuster.launcher.jobs.jobs import cancelled_before_start, view_jobs
from torchmuster.multirun.sweep.arrays import read_arrays
from torchmuster.workflow.record import State, read_outcome

_ASK_S = 20.0
_END_S = 60.0
_LOOK_S = 0.5
_CAUGHT_UP: set[str] = set()  # run directories that this process has caught up


def catch_up(run_dir: RunDir, *, again: bool = False) -> None:
    """Update the copy of a run in pods if it has not ended; ignore errors.

    A process does so once for each run, except with `again`.
    """
    run = RunInPods.of(run_dir)
    if run is None or run.order.is_sweep or read_result(run_dir) is not None:
        return
    if run_dir.path in _CAUGHT_UP and not again:
        return
    _CAUGHT_UP.add(run_dir.path)
    mirror = RecordMirror(run, PodWatch(run.job_id), lambda _: None)
    mirror.takes = is_submitted_here(run_dir)
    lacks_right = None
    try:
        mirror.catch_up()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_no_reach(run_dir))
    except NotAllowedError as error:
        lacks_right = error.fix
        with contextlib.suppress(MusterError, OSError):
            _keep_log(run, error)
    except (MusterError, OSError) as error:
        why = error.what if isinstance(error, MusterError) else str(error)
        if mirror.is_up:
            with contextlib.suppress(OSError):
                atomic.write_json(_no_reach(run_dir), {"why": why, "is_old": True})
    with contextlib.suppress(MusterError):
        is_known = mirror.is_connected and not mirror.is_complete
        LostPodRemover(run, lambda _: None).look(asks=not mirror.is_connected, is_known=is_known)
    if mirror.is_complete and is_submitted_here(run_dir):
        with contextlib.suppress(MusterError):
            remove(run.job_id)  # everything is here
        return
    with contextlib.suppress(MusterError, OSError):
        LossNotes(run, lambda _: None).look()
    if read_result(run_dir) is None:
        with contextlib.suppress(MusterError):
            save_last_message(run, lacks_right)


def _no_reach(run_dir: RunDir) -> str:
    return os.path.join(run_dir.path, "pods", "no-reach.json")


def _keep_log(run: RunInPods, error: NotAllowedError) -> None:
    """Save the first pod's log, as the record can't be read, and note why."""
    pod = find_pod(run.job_id, 0)
    if pod is None:
        return
    atomic.replace_file(run.run_dir.job_log, log_of(run.job_id, pod).encode())
    atomic.write_json(_no_reach(run.run_dir), {"why": error.fix or error.why or error.what})


def words_on_reach(run_dir: RunDir) -> str | None:
    """Return why the copy of a running run is incomplete; None if it is not."""
    noted = atomic.read_json(_no_reach(run_dir))
    if not isinstance(noted, dict) or read_result(run_dir) is not None:
        return None
    if noted.get("is_old"):
        return f"the first pod can't be reached now ({noted.get('why')}): what is shown came before"
    return f"pods can't be reached from here: {noted.get('why')}; what the first pod wrote is in {run_dir.job_log}"


def save_last_message(run: RunInPods, lacks_right: str | None) -> None:
    """Save the result from the first pod's last message, as the record did not come.

    Raises:
        EngineError: The cluster can't be queried.
    """
    run_dir, pod = run.run_dir, find_pod(run.job_id, 0)
    result = result_of_pod(pod, run_dir)
    if result is None or pod is None:
        return
    result = explain_loss(result, run)
    # A cancel removes the Job in any case.
    if result.attempts > 0 and not os.path.exists(run_dir.cancelled):
        missing = explain_missing(result.state, run, pod, lacks_right)
        report = result.report
        if result.state is RunState.SUCCEEDED or report is None:
            report = missing
        else:
            report = replace(report, because=(*report.because, missing.error, *missing.because))
        result = replace(result, report=report)
        if result.state is RunState.SUCCEEDED:
            code = MissingRecordError.exit_code
            result = replace(result, state=RunState.LOST, exit_code=code)
    atomic.write_json(run_dir.result, codec.to_plain(result))


def explain_missing(
    state: RunState | State, run: RunInPods, pod: Pod | None, lacks_right: str | None
) -> Report:
    """Return a report on a run or group of which at most the last message came; its Job stays."""
    order, (_, namespace, _) = run.order, place_of(run.job_id)
    lies = "went with its first pod, which somebody has deleted"
    hint = "`claims` and `home` of the site keep files on a volume"
    if pod is not None:
        lies = f"went with pod {pod.name} on {pod.node}"
        hint = f"kubectl -n {namespace} logs {pod.name} shows what it printed; {hint}"
    if order.has_volume:
        lies = f"are in {order.folder} on its volume"
        hint = f"muster fetch {short_id(order.run_id)}"
    why = "nobody has taken them from its first pod before that ended"
    return Report(
        error=f"its results, logs and files did not come here: it has ended ({state.value.lower()}), and they {lies}",
        at=f"job {run.job_id}, which was not removed",
        because=("pods can't be reached from here" if lacks_right else why,),
        hint=lacks_right or hint,
    )


def cancel_run(run_dir: RunDir) -> bool:
    """Cancel a run in pods; return False if it is not one.

    The owner ends it, its record comes here, then all objects are removed.

    Raises:
        EngineError: The cluster refuses.
    """
    run = RunInPods.of(run_dir)
    if run is None:
        return False
    job_id = run.job_id
    with contextlib.suppress(MusterError, OSError):
        ask_owner_to_end(run)
        _wait_for_record(run_dir)
    view = view_jobs(DIALECT, [job_id]).get(job_id) if read_result(run_dir) is None else None
    remove(job_id)
    if read_result(run_dir) is None:
        result = cancelled_before_start(run_dir)
        if view is not None and view.reason in (WAITS_FOR_CLIENT, LOST_AT_END):
            report = Report(
                error="it had ended: its results, logs and files went with its first pod",
                at=f"job {job_id}",
                because=("the pod could not be reached when you cancelled it",),
            )
            result = replace(result, report=report)
        atomic.write_json(run_dir.result, codec.to_plain(result))
    return True


def remove_left(run_dir: RunDir) -> list[str]:
    """Remove what an ended run left on its cluster, as its files did not come or its owner died.

    Raises:
        EngineError: The cluster refuses.
    """
    if pod_order(run_dir) is None:
        return remove_groups(run_dir)
    result, arrays = read_result(run_dir), read_arrays(run_dir)
    job_ids = [array.job_id for array in arrays.arrays] if arrays is not None else []
    if result is not None and result.exit_code == MissingRecordError.exit_code:
        job_ids = [job_of(run_dir) or ""]
    return [job_id for job_id in job_ids if job_id and ask(DIALECT.cancel_argv(job_id))]


def remove_groups(run_dir: RunDir) -> list[str]:
    """Remove what a workflow with a killed owner left on its cluster; return the Jobs.

    Raises:
        EngineError: The cluster refuses.
    """
    found: list[str] = []
    folder = os.path.join(run_dir.path, "groups")
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        run = RunInPods.of(run_dir, name)
        if run is not None and read_outcome(run_dir, name) is None:
            found += remove_group(run)
    return found


def remove_group(run: RunInPods) -> list[str]:
    """Remove all objects of a group; return its Jobs.

    Raises:
        EngineError: The cluster refuses.
    """
    noted = atomic.read_json(run.run_dir.group(run.order.group or "").job) or {}
    jobs = [run.job_id, *map(str, noted.get("more", ()))]
    remove_jobs(jobs, noted.get("set"))
    return jobs


def remove_jobs(job_ids: Sequence[str], set_id: str | None) -> None:
    """Remove all objects of a group: of each Job, or of their JobSet.

    Raises:
        EngineError: The cluster refuses.
    """
    if set_id is not None:
        ask(DIALECT.remove_set_argv(set_id))
        return
    for job_id in job_ids:
        remove(job_id)


def remove(job_id: str) -> None:
    """Remove all objects of a run.

    Raises:
        EngineError: The cluster refuses.
    """
    ask(DIALECT.cancel_argv(job_id))


def ask_owner_to_end(run: RunInPods) -> None:
    """Ask the owner in the first pod to end its run or group.

    Raises:
        MusterError: The pod does not run, or can't be reached.
    """
    pod = run.first_pod()
    if pod is None or not pod.is_up:
        raise MusterError("the first pod does not run")
    note = os.path.join(run.order.folder, os.path.basename(run.run_dir.cancelled))
    with forward(run.job_id, pod.name, run.order.port) as way:
        # The owner checks for the note on the signal, to tell a user's cancel from a lost node.
        command = f'echo "{{}}" >"{note}" && kill -TERM 1'
        proc.ask(run.argv(way.port, command), b"", _ASK_S)


def _wait_for_record(run_dir: RunDir) -> None:
    deadline = time.monotonic() + _END_S
    while read_result(run_dir) is None and time.monotonic() < deadline:
        catch_up(run_dir, again=True)
        if read_result(run_dir) is None:
            time.sleep(_LOOK_S)  # noqa: TID251  # asks a cluster
