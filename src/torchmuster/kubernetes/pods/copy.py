"""The client's copy of a run in pods: as it runs, until its end, or fetched afterwards.

While somebody follows a run, its pods are watched, its record is mirrored, and both end with it.
What runs have left comes from first pods while they wait, or from a volume.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, member_of_id, short_id
from torchmuster.core.model import codec
from torchmuster.core.model.states import JobState, RunState
from torchmuster.core.model.verdict import Report, Result
from torchmuster.core.owner.create import failed_before_start
from torchmuster.core.owner.record import read_result, recorded_seconds
from torchmuster.errors import JoinTimeoutError, MissingRecordError, MusterError, UsageError
from torchmuster.kubernetes.engine.answers import LOST_AT_END, RUN_LABEL
from torchmuster.kubernetes.engine.dialect import DIALECT, job_id_of, kubectl, place_of
from torchmuster.kubernetes.node.order import INDEX_VARIABLE, READS_VARIABLE, PodOrder
from torchmuster.kubernetes.pods.elsewhere import groups_copied, is_elsewhere, look_for_groups
from torchmuster.kubernetes.pods.end import explain_missing, remove, remove_group, save_last_message
from torchmuster.kubernetes.pods.losses import LossNotes, LostPodRemover
from torchmuster.kubernetes.pods.members import MemberCopies, ObjectRestorer, members_copied
from torchmuster.kubernetes.pods.mirror import RecordMirror, holds_record
from torchmuster.kubernetes.pods.reach import (
    PodWatch,
    ask,
    find_pod,
    is_submitted_here,
    job_of,
    looking,
    pod_order,
    refused,
)
from torchmuster.kubernetes.pods.starts import PodStarts
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.jobs.jobs import mark_views_stale, read_request
from torchmuster.launcher.jobs.links import view_newest
from torchmuster.launcher.model.job import JobView
from torchmuster.launcher.model.run import record_of
from torchmuster.launcher.views.account import find_saved, how_to_go_on
from torchmuster.multirun.sweep.arrays import read_arrays

_MOST_LINES = 1 << 16
_LOOK_ON_S = 5.0
_LAST_S = 5.0  # from a Job's end to that of its record, if the record is arriving


@contextlib.contextmanager
def copied(run_dir: RunDir) -> "Iterator[RunCopy | None]":
    """Copy a run's record while the context is open; do nothing for a run with its owner here.

    For a member of a sweep the records of all members are copied.
    """
    if member_of_id(os.path.basename(run_dir.path)) is not None:
        sweep_dir = RunDir(os.path.dirname(os.path.dirname(run_dir.path)))
        run_dir = sweep_dir if os.path.isfile(sweep_dir.arrays) else run_dir
    if os.path.isfile(run_dir.arrays):
        with members_copied(run_dir):
            yield None
        return
    if is_elsewhere(run_dir):
        with groups_copied(run_dir):
            yield None
        return
    copy = RunCopy.of(run_dir, lambda _: None, lambda _: None)
    if copy is None:
        yield None
        return
    try:
        with looking("look-on", _LOOK_ON_S, lambda: copy.remove_lost_pods(view_newest(run_dir))):
            yield copy
    finally:
        copy.close()


@dataclass(slots=True)
class LinesOnce:
    """Shows each line once that arrives by two ways, the record and the first pod's log.

    Remembers the last 65,536 lines; the ways may deliver in any order.
    """

    _shown: dict[int, int] = field(default_factory=dict)
    _come: dict[tuple[str, int], int] = field(default_factory=dict)

    def new_of(self, way: str, text: str) -> str:
        """Return those lines of a text from one way that the other way has not delivered."""
        return "".join(filter(partial(self._is_new, way), text.splitlines(keepends=True)))

    def _is_new(self, way: str, line: str) -> bool:
        known = hash(line)
        come = self._come[way, known] = self._come.get((way, known), 0) + 1
        if come <= self._shown.get(known, 0):
            return False
        self._shown[known] = come
        if len(self._shown) > _MOST_LINES:
            oldest = next(iter(self._shown))
            del self._shown[oldest]
            for one in ("record", "log"):
                self._come.pop((one, oldest), None)
        return True


@dataclass(slots=True)
class RunCopy:
    """The copy of one run while somebody follows it.

    Attributes:
        lines: Which of rank 0's lines the terminal has shown.
        objects: The run's Secret and Service; None on a machine that has not made them.
    """

    run_dir: RunDir
    job_id: str
    watch: PodWatch
    mirror: RecordMirror
    release: LostPodRemover
    starts: PodStarts
    losses: LossNotes
    say: Callable[[str], None]
    lines: LinesOnce
    objects: ObjectRestorer | None = None
    _said: set[str] = field(default_factory=set)
    _has_trained: bool = False
    _seen: int = 0
    _over_since: float | None = None

    @classmethod
    def of(
        cls, run_dir: RunDir, say: Callable[[str], None], show: Callable[[str], None]
    ) -> "RunCopy | None":
        """Start the copy of a run; return None for a run that has ended or is not in pods.

        Args:
            run_dir: The run directory.
            say: Gets muster's own messages.
            show: Gets the first pod's output if only its log is available.
        """
        order, job_id = pod_order(run_dir), job_of(run_dir)
        if order is None or job_id is None or read_result(run_dir) is not None:
            return None
        watch = PodWatch(job_id, say)
        takes, lines = is_submitted_here(run_dir), LinesOnce()

        def show_new(text: str) -> None:
            if new := lines.new_of("log", text):
                show(new)

        mirror = RecordMirror(run_dir, order, job_id, watch, say, show_new, takes=takes)
        watch.start()
        mirror.start()
        return cls(
            run_dir=run_dir,
            job_id=job_id,
            watch=watch,
            mirror=mirror,
            release=LostPodRemover(run_dir, order, job_id, say),
            starts=PodStarts(order, job_id),
            losses=LossNotes(run_dir, order, job_id, say),
            say=say,
            lines=lines,
            objects=_objects_of(run_dir, job_id, watch, say),
        )

    def has_news(self) -> bool:
        """Say whether the pods have changed since the last call; then drop the cached job view."""
        number, before = self.watch.number, self._seen
        self._seen = number
        if number != before:
            mark_views_stale(DIALECT, [self.job_id], self.watch.changed_at)
        return number != before

    def remove_lost_pods(self, view: JobView | None) -> None:
        """Remove pods that are lost with their node, and note the reasons for losses."""
        with contextlib.suppress(MusterError):
            self.release.look(view, is_known=self.mirror.is_settled)
            self.mirror.look()
        with contextlib.suppress(MusterError, OSError):
            self.losses.look(view)

    def look_after(self, view: JobView | None) -> None:
        """Do the same as `remove_lost_pods`, replace deleted objects, and end a run whose start fails."""
        self._over_since = None
        self.remove_lost_pods(view)
        self._keep_objects()
        has_begun = os.path.exists(self.run_dir.events)
        if self.mirror.is_connected and not has_begun:
            with contextlib.suppress(MusterError):
                if reason := self.starts.no_room(view):
                    self.mirror.note_no_room(reason)
                if (waits := self.starts.waits_for(view)) is not None:
                    self.say(waits)
        if view is not None and view.reason == LOST_AT_END:
            self._end_in_vain(view)
            return
        if has_begun and not self._has_trained:
            self._has_trained = bool(record_of(self.run_dir).attempts)
        report = self.starts.judge(view, has_begun=has_begun, has_trained=self._has_trained)
        if report is not None:
            self.mirror.stop()
            with contextlib.suppress(MusterError):
                remove(self.job_id)
            is_blind = view is not None and view.state is JobState.UNKNOWN
            code = EngineError.exit_code if is_blind else JoinTimeoutError.exit_code
            result = failed_before_start(self.run_dir, code, report)
            atomic.write_json(self.run_dir.result, codec.to_plain(result))

    def _end_in_vain(self, view: JobView) -> None:
        """End a run whose pods have ended and whose first pod is lost with all it held."""
        self.mirror.stop()
        report = Report(
            error="its results, logs and files went with its first pod, which was lost after the run had ended",
            at=f"job {view.job_id}",
            hint="`claims` and `home` of the site keep files on a volume",
        )
        _keep_lost(self.run_dir, report)
        with contextlib.suppress(MusterError):
            remove(self.job_id)

    def _keep_objects(self) -> None:
        if self.objects is None:
            return
        try:
            self.objects.look()
        except (MusterError, OSError) as error:
            why = error.what if isinstance(error, MusterError) else str(error)
            if why not in self._said:
                self._said.add(why)
                self.say(f"whether the run's Secret and Service are there: {why}")

    def join(self, result: Result) -> Result:
        """Add to the result what only the cluster knows, and save it."""
        joined = self.starts.joined(result)
        if joined is not result:
            atomic.write_json(self.run_dir.result, codec.to_plain(joined))
        return joined

    def take_last_words(self) -> bool:
        """Save what is known of a run whose Job is over but whose record has not come.

        Return whether nothing more will come.
        """
        now = time.monotonic()
        since = self._over_since = now if self._over_since is None else self._over_since
        if self.mirror.is_finishing or (self.mirror.is_connected and now < since + _LAST_S):
            return False
        if read_result(self.run_dir) is None:
            with contextlib.suppress(MusterError):
                save_last_message(self.run_dir, self.job_id, self.mirror.lacks_right)
        if read_result(self.run_dir) is None:
            _keep_deletion(self.run_dir, self.job_id)
        if read_result(self.run_dir) is None:
            with contextlib.suppress(MusterError):
                _keep_loss(self.run_dir, self.job_id)
        return True

    def close(self) -> None:
        """End watch and mirror; remove an ended run's objects unless they have more than the copy.

        A client on another machine leaves the removal to the one that submitted the run.
        """
        self.watch.stop()
        self.mirror.stop()
        result = read_result(self.run_dir) if is_submitted_here(self.run_dir) else None
        if result is not None and (
            result.attempts == 0 or holds_record(self.run_dir.path, self.job_id)
        ):
            try:
                remove(self.job_id)
            except MusterError as error:
                self.say(
                    f"{self.job_id} stays on the cluster: {error.what} ({error.fix or error.why})"
                )


def _keep_loss(run_dir: RunDir, job_id: str) -> None:
    """Save the result of a run whose Job is over and whose first pod was deleted.

    Raises:
        EngineError: The cluster can't be queried.
    """
    view, order = view_newest(run_dir), pod_order(run_dir)
    if view is None or order is None or find_pod(job_id, order.index) is not None:
        return
    if view.state not in (JobState.SUCCEEDED, JobState.FAILED):
        return
    state = RunState.SUCCEEDED if view.state is JobState.SUCCEEDED else RunState.FAILED
    _keep_lost(run_dir, explain_missing(state, order, job_id, None, None))


def _keep_lost(run_dir: RunDir, report: Report) -> None:
    result = failed_before_start(run_dir, MissingRecordError.exit_code, report)
    attempts = len(record_of(run_dir).attempts)
    elapsed_s = recorded_seconds(run_dir.events)
    result = replace(result, state=RunState.LOST, attempts=max(1, attempts), elapsed_s=elapsed_s)
    atomic.write_json(run_dir.result, codec.to_plain(result))


def _objects_of(
    run_dir: RunDir, job_id: str, watch: PodWatch, say: Callable[[str], None]
) -> ObjectRestorer | None:
    """Return the keeper of a run's objects, on the machine that made them."""
    if not is_submitted_here(run_dir):
        return None
    try:
        return ObjectRestorer(read_request(run_dir).request, job_id, watch, say)
    except MusterError:  # written by another version of muster
        return None


def _keep_deletion(run_dir: RunDir, job_id: str) -> None:
    """Save the result of a run whose Job was deleted; nobody else will. Leave other runs alone."""
    view, order = view_newest(run_dir), pod_order(run_dir)
    if view is None or view.state is not JobState.CANCELLED or order is None:
        return
    saved, name = find_saved(run_dir), short_id(os.path.basename(run_dir.path))
    again = how_to_go_on(run_dir) or f"muster restart {name}"
    left = f"what it has kept on its volume is still there: {order.folder}"
    if not order.has_volume:
        left = f"the disks of its pods went with it; what had come by then is in {run_dir.path}"
    if saved is not None and not saved.is_seen:
        again = "type its command again; `claims` and `home` of the site keep runs on a volume"
    report = Report(
        error="the cluster does not have the run's Job any more",
        at=f"job {job_id}",
        because=("it was deleted, or its namespace, or it ended more than 24 h ago", left),
        hint=again,
    )
    result = failed_before_start(run_dir, 128 + signal.SIGTERM, report)
    attempts = len(record_of(run_dir).attempts)
    result = replace(result, state=RunState.CANCELLED, attempts=attempts)
    atomic.write_json(run_dir.result, codec.to_plain(result))
    with contextlib.suppress(MusterError):
        remove(job_id)  # the Job may not have owned its Secret and Service


_START_S = 300.0  # for a reading pod; an image may have to be pulled
_SERVER_LIMIT_S = 30.0
_LOOK_S = 0.5
_ASK_S = 25.0
_LIFE_S = 1800  # of that pod if its client dies
_MOST_NAME = 48
_FETCH = "-fetch"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfetchedRecord:
    """One record: of a run, a workflow group or a sweep member.

    Attributes:
        name: Its name in messages.
        run_dir: Its directory here; for a group the workflow's.
        result: The file here with its result.
    """

    name: str
    run_dir: RunDir
    order: PodOrder
    job_id: str
    result: str


def fetch(run_dir: RunDir, say: Callable[[str], None]) -> None:
    """Fetch what is missing here of a run, a workflow or a sweep in pods.

    Raises:
        UsageError: It has nothing in pods.
        MusterError: Some of it is gone or can't be reached; the rest has been fetched.
    """
    name = short_id(os.path.basename(run_dir.path))
    parts = list(_parts(run_dir))
    if not parts:
        raise UsageError(f"{name} has nothing in pods: all of it is here", where=run_dir.path)
    missing = [part for part in parts if not holds_record(_folder(part), part.job_id)]
    waiting = [part for part in missing if _is_up(part)]
    for part in waiting:
        _take(part, part.job_id, say)
    ended = [part for part in missing if part not in waiting]
    if kept := [part for part in ended if part.order.has_volume]:
        _take_from_volume(kept, say)
    gone = [part for part in ended if not part.order.has_volume]
    if gone:
        raise MusterError(
            f"the files, logs and record of {', '.join(part.name for part in gone)} went with their pods",
            where=f"job {gone[0].job_id}",
            why="nobody took them in time, and they were not kept on a volume",
            fix="`claims` and `home` of the site keep runs on a volume",
        )
    if _is_ours(run_dir):
        for part in missing:
            _remove(part)
    say(f"all of {name} is here: {run_dir.path}")


def _parts(run_dir: RunDir) -> Iterator[UnfetchedRecord]:
    """Yield the records in pods of a run, workflow or sweep directory."""
    name = short_id(os.path.basename(run_dir.path))
    order, job_id = pod_order(run_dir), job_of(run_dir)
    if order is not None and job_id is not None and not order.members:
        yield UnfetchedRecord(
            name=name, run_dir=run_dir, order=order, job_id=job_id, result=run_dir.result
        )
    elif (copies := MemberCopies.of(run_dir)) is not None:
        for index in range(len(copies.order.members)):
            member = copies.place(index)
            own, of_name = copies.order.of_member(index), os.path.basename(member.path)
            if os.path.exists(member.result):
                yield UnfetchedRecord(
                    name=of_name,
                    run_dir=member,
                    order=own,
                    job_id=copies.job_id,
                    result=member.result,
                )
    if is_elsewhere(run_dir):
        look_for_groups(run_dir)
    folder = os.path.join(run_dir.path, "groups")
    for group in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        own_order, first = pod_order(run_dir, group), job_of(run_dir, group)
        if own_order is not None and first is not None:
            result = run_dir.group(group).result
            yield UnfetchedRecord(
                name=group, run_dir=run_dir, order=own_order, job_id=first, result=result
            )


def _is_ours(run_dir: RunDir) -> bool:
    """Say whether this machine made the Jobs."""
    arrays = read_arrays(run_dir)
    if arrays is not None:
        return arrays.request is not None
    if os.path.isdir(os.path.join(run_dir.path, "groups")):
        return not is_elsewhere(run_dir)
    return is_submitted_here(run_dir)


def _remove(part: UnfetchedRecord) -> None:
    """Remove the Job of a record, or all Jobs of its group."""
    if part.order.group is None:
        remove(part.job_id)
    else:
        remove_group(part.run_dir, part.order.group, part.job_id)


def _folder(part: UnfetchedRecord) -> str:
    group = part.order.group
    return part.run_dir.path if group is None else part.run_dir.group(group).path


def _is_up(part: UnfetchedRecord) -> bool:
    pod = find_pod(part.job_id, part.order.index)
    return pod is not None and pod.is_up


def _take(
    part: UnfetchedRecord, job_id: str, say: Callable[[str], None], *, reads_volume: bool = False
) -> None:
    """Copy one record from a pod; a waiting first pod then ends.

    Raises:
        MusterError: The pod can't be reached, or the run has not ended.
    """
    _forget_missing(part)
    watch = PodWatch(job_id)
    mirror = RecordMirror(part.run_dir, part.order, part.job_id, watch, say, takes=True)
    mirror.reader = job_id if reads_volume else None
    deadline = time.monotonic() + _SERVER_LIMIT_S
    mirror.catch_up()
    while not mirror.is_connected and time.monotonic() < deadline:  # its server starts in a moment
        time.sleep(_LOOK_S)  # noqa: TID251  # asks a pod
        mirror.catch_up()
    if not mirror.is_connected:
        raise MusterError(f"the pod that has {part.name} does not answer", where=f"job {job_id}")
    if not mirror.is_complete:
        name = short_id(os.path.basename(part.run_dir.path))
        raise MusterError(
            f"{part.name} has not ended: what it has written so far is here now",
            fix=f"muster wait {name}",
        )


def _take_from_volume(parts: Sequence[UnfetchedRecord], say: Callable[[str], None]) -> None:
    """Start one pod that mounts the volume and serves sessions, and copy the records from it.

    Raises:
        MusterError: It does not start, or the volume lacks a record.
    """
    context, namespace, job = place_of(parts[0].job_id)
    made = _reader_of(_job_on_cluster(parts), f"{job[:_MOST_NAME]}{_FETCH}")
    reader = job_id_of(context, namespace, made["metadata"]["name"])
    argv = kubectl(context, namespace, "create", "-f", "-")
    said = proc.ask(argv, json.dumps(made).encode(), _ASK_S)
    if said.status != 0:
        raise refused(argv, said.stderr.decode(errors="replace"))
    say(f"a pod of {made['metadata']['name']} reads the volume")
    try:
        deadline = time.monotonic() + _START_S
        while (pod := find_pod(reader, 0)) is None or not pod.is_up:
            if time.monotonic() > deadline:
                raise MusterError(f"no pod came within {_START_S:g} s", where=f"job {reader}")
            time.sleep(_LOOK_S)  # noqa: TID251  # asks a cluster
        for part in parts:
            _take(part, reader, say, reads_volume=True)
    finally:
        words = ("delete", f"jobs.batch/{made['metadata']['name']}", "--wait=false")
        with contextlib.suppress(MusterError):
            ask(kubectl(context, namespace, *words))


def _job_on_cluster(parts: Sequence[UnfetchedRecord]) -> dict[str, Any]:
    """Return the first of these Jobs that still exists: it says how to mount the volume.

    Raises:
        MusterError: None exists.
    """
    for job_id in dict.fromkeys(part.job_id for part in parts):
        context, namespace, name = place_of(job_id)
        with contextlib.suppress(MusterError):
            text = ask(kubectl(context, namespace, "get", f"jobs.batch/{name}", "-o", "json"))
            found: dict[str, Any] = json.loads(text)
            return found
    raise MusterError(
        "the cluster does not have the run's Job any more, by which its volume would be read",
        where=f"job {parts[0].job_id}",
        fix=f"any pod with that volume has it in {parts[0].order.folder}",
    )


def _reader_of(job: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a Job for one pod like the others, without devices, that only serves sessions."""
    template = json.loads(json.dumps(job["spec"]["template"]))
    metadata = template["metadata"]
    labels = metadata.get("labels", {}).items()
    own_labels = {k: v for k, v in labels if "job" not in k and "controller" not in k}
    annotations = metadata.get("annotations", {})
    template["metadata"] = {
        "labels": {**own_labels, RUN_LABEL: name},
        "annotations": annotations,
    }
    for container in template["spec"]["containers"]:
        container.pop("resources", None)
        own = [one for one in container.get("env", ()) if one["name"] != INDEX_VARIABLE]
        own += [{"name": INDEX_VARIABLE, "value": "1"}, {"name": READS_VARIABLE, "value": "yes"}]
        container["env"] = own
    kept = {key: job["metadata"].get(key, {}) for key in ("annotations", "namespace")}
    marks = {k: v for k, v in job["metadata"].get("labels", {}).items() if "job" not in k}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**kept, "name": name, "labels": {**marks, RUN_LABEL: name}},
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "activeDeadlineSeconds": _LIFE_S,
            "ttlSecondsAfterFinished": 60,
            "template": template,
        },
    }


def _forget_missing(part: UnfetchedRecord) -> None:
    """Delete a result that only says what did not come."""
    noted = atomic.read_json(part.result)
    if isinstance(noted, dict) and noted.get("exit_code") == MissingRecordError.exit_code:
        os.unlink(part.result)
