"""Restarting a run in pods: what the earlier run left, and what went with its pods."""

import os

from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.owner.record import read_result
from torchmuster.errors import UsageError
from torchmuster.kubernetes.engine.wishes import claims_of, keeps_runs
from torchmuster.kubernetes.node.order import PodOrder
from torchmuster.kubernetes.pods.bring import EarlierRun
from torchmuster.launcher.model.job import JobRequest
from torchmuster.launcher.views.account import find_saved


def find_earlier_run(old: RunDir, order: PodOrder, job: JobRequest) -> EarlierRun | None:
    """Return the run to resume from; None if the new run begins like a first one.

    Args:
        old: The old run's directory here.
        order: The order of its pods.
        job: The request to the cluster.

    Raises:
        UsageError: Its snapshots were on the disks of its pods.
    """
    saved, result = find_saved(old), read_result(old)
    step = saved.step if saved is not None else None
    if step is None and result is not None:
        step = result.saved_step  # the record may be missing here
    own = order.run_dir.snapshots
    folder = saved.folder if saved is not None and saved.folder != old.snapshots else own
    if step is not None and not _outlives_pods(folder, job):
        raise UsageError(
            f"the snapshots of {short_id(order.run_id)} are gone: the last was of step {step}",
            where=folder,
            why="they were on the disks of its pods and went with them",
            fix="type its command again to start over at step 0; `claims` and `home` of the site keep runs on a volume",
        )
    if not keeps_runs(job):
        return None
    is_own = os.path.normpath(folder) == own
    return EarlierRun(run_id=order.run_id, saved_step=step if is_own else None)


def _outlives_pods(folder: str, job: JobRequest) -> bool:
    """Say whether a folder is a URL or on a volume."""
    volumes = (claim.path.rstrip("/") for claim in claims_of(job))
    return "://" in folder or any(
        folder == path or folder.startswith(f"{path}/") for path in volumes
    )
