"""A workflow in pods that another machine has submitted, as its Jobs show it: found again and again, since its groups come one by one.

Here it has the form of a workflow whose groups are jobs: `jobs.json` names those that were seen. What its owner knows beyond that
stays with the owner.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchmuster.engines.kubernetes.dialect import DIALECT, job_id_of
from torchmuster.errors import MusterError
from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.outcome import GroupOutcome
from torchmuster.model.states import State
from torchmuster.model.verdict import Report
from torchmuster.node.pod import order as orders
from torchmuster.node.pod.order import PodOrder
from torchmuster.owner.pods.adopt import jobs_of, order_in
from torchmuster.owner.pods.end import remove_jobs, tell_owner
from torchmuster.owner.pods.mirror import RecordMirror
from torchmuster.owner.pods.reach import job_of, pod_order
from torchmuster.owner.pods.watch import PodWatch
from torchmuster.owner.views.record import read_outcome
from torchmuster.owner.views.workflow_view import read_workflow

_LOOK_S = 10.0  # at the Jobs of the workflow: each look is a question to the API
_END_S = 60.0
_AGAIN_S = 0.5


def is_elsewhere(run_dir: RunDir) -> bool:
    """Say whether a run directory is that of a workflow in pods which another machine has submitted."""
    return _place(run_dir) is not None


def look_for_groups(run_dir: RunDir) -> None:
    """Note those groups of the workflow that have Jobs by now.

    Raises:
        MusterError: The cluster can't be asked.
    """
    place = _place(run_dir)
    if place is None:
        return
    noted = atomic.read_json(run_dir.jobs)
    known = dict(noted["jobs"])
    of_secrets = jobs_of(*place, os.path.basename(run_dir.path))
    secrets = dict(noted.get("secrets", {}))
    plan = read_workflow(run_dir)
    groups = {group.name for group in plan.groups} if plan is not None else set()
    for secret, jobs in of_secrets.items():
        if secret not in secrets:
            order = order_in(*place, secret)
            if order.group in groups:  # it becomes a path here
                secrets[secret] = order.group
                known[order.group] = _note(run_dir, order, place, jobs)
    seen_at = time.time() if of_secrets else noted.get("seen_at", 0.0)
    atomic.write_json(
        run_dir.jobs, {**noted, "jobs": known, "secrets": secrets, "seen_at": seen_at}
    )


def _note(
    run_dir: RunDir, order: PodOrder, place: tuple[str, str], jobs: Sequence[Mapping[str, Any]]
) -> str:
    """Write what its owner has of a group's Jobs; return the first one's id."""
    group = run_dir.group(order.group or "")
    os.makedirs(os.path.join(group.path, "pods"), mode=0o700, exist_ok=True)
    path = os.path.join(group.path, "pods", orders.ORDER_FILE)
    atomic.write_json(path, codec.to_plain(order))
    first = job_id_of(*place, order.job)
    names = (str(job["metadata"]["name"]) for job in jobs)
    more = sorted(job_id_of(*place, name) for name in names if name != order.job)
    owners = (one for job in jobs for one in job["metadata"].get("ownerReferences", ()))
    sets = (job_id_of(*place, str(one["name"])) for one in owners if one.get("kind") == "JobSet")
    noted = {"engine": DIALECT.name, "job_id": first, "more": more, "set": next(sets, None)}
    atomic.write_json(group.job, noted)
    return first


def catch_up_groups(run_dir: RunDir) -> None:
    """Bring the copies of all groups up to date; silent where that can't be done."""
    with contextlib.suppress(MusterError):
        look_for_groups(run_dir)
    for _, order, job_id in _open_groups(run_dir):
        mirror = RecordMirror(run_dir, order, job_id, PodWatch(job_id), lambda _: None)
        with contextlib.suppress(MusterError, OSError):
            mirror.catch_up()


def cancel_groups(run_dir: RunDir) -> bool:
    """End the groups that run, and remove their Jobs; say whether the workflow is one of another machine.

    Groups that have not begun are for the owner to leave out: it ends those that need the output of one that was cancelled.

    Raises:
        MusterError: The cluster refuses.
    """
    if not is_elsewhere(run_dir):
        return False
    look_for_groups(run_dir)
    atomic.write_json(run_dir.cancelled, {"by": "muster cancel"})
    found = _open_groups(run_dir)
    told: set[str] = set()
    for group, order, job_id in found:
        with contextlib.suppress(MusterError, OSError):
            tell_owner(run_dir, order, job_id)
            told.add(group)
    deadline = time.monotonic() + _END_S
    while told & {name for name, _, _ in _open_groups(run_dir)} and time.monotonic() < deadline:
        catch_up_groups(run_dir)
        time.sleep(_AGAIN_S)  # noqa: TID251  # asks a cluster
    for group, _, job_id in found:
        noted = atomic.read_json(run_dir.group(group).job)
        remove_jobs([job_id, *map(str, noted.get("more", ()))], noted.get("set"))
        if read_outcome(run_dir, group) is None:
            atomic.write_json(run_dir.group(group).result, codec.to_plain(_cancelled(group)))
    return True


def _cancelled(group: str) -> GroupOutcome:
    return GroupOutcome(
        group=group,
        state=State.FAILED_CANCELED,
        exit_code=128 + signal.SIGINT,
        elapsed_s=0.0,
        report=Report(error="the group was stopped", because=("you cancelled its workflow",)),
    )


def _place(run_dir: RunDir) -> tuple[str, str] | None:
    noted = atomic.read_json(run_dir.jobs) if os.path.isfile(run_dir.jobs) else None
    place = noted.get("elsewhere") if isinstance(noted, dict) else None
    return (str(place["context"]), str(place["namespace"])) if isinstance(place, dict) else None


def _open_groups(run_dir: RunDir) -> list[tuple[str, PodOrder, str]]:
    """Return the groups that have begun and left no outcome here, with what their pods were told and their first Job."""
    noted = atomic.read_json(run_dir.jobs)
    found = []
    for group in noted.get("jobs", {}):
        order, job_id = pod_order(run_dir, group), job_of(run_dir, group)
        if order is not None and job_id is not None and read_outcome(run_dir, group) is None:
            found.append((group, order, job_id))
    return found


@dataclass(slots=True)
class GroupCopies:
    """Copies the records of all groups while somebody looks, those that begin later among them."""

    run_dir: RunDir
    _copies: dict[str, tuple[PodWatch, RecordMirror]] = field(default_factory=dict)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin, in a thread."""
        threading.Thread(target=self._work, name="groups", daemon=True).start()

    def take_last_words(self) -> bool:
        """Say that no more comes: how a group has ended is for its owner to say, where that is not in its record."""
        return True

    def close(self) -> None:
        """End all copies."""
        self._stopping.set()
        for watch, mirror in list(self._copies.values()):
            watch.stop()
            mirror.stop()

    def _work(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(MusterError):
                look_for_groups(self.run_dir)
            for group, order, job_id in _open_groups(self.run_dir):
                if group not in self._copies and not self._stopping.is_set():
                    watch = PodWatch(job_id)
                    mirror = RecordMirror(self.run_dir, order, job_id, watch, lambda _: None)
                    self._copies[group] = watch, mirror
                    watch.start()
                    mirror.start()
            self._stopping.wait(_LOOK_S)
