"""The client's copy of a run in pods: as it runs, until its end, or fetched afterwards.

While somebody follows a run, its pods are watched, its record is mirrored, and both end with it.
What runs have left comes from first pods while they wait, or from a volume.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, member_of_id, short_id
from torchmuster.core.model import codec
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report, Result
from torchmuster.core.owner.create import failed_before_start
from torchmuster.core.owner.record import read_result, recorded_seconds
from torchmuster.errors import JoinTimeoutError, MissingRecordError, MusterError, UsageError
from torchmuster.kubernetes.engine.answers import LOST_AT_END, RUN_LABEL
from torchmuster.kubernetes.engine.dialect import DIALECT, job_id_of, kubectl_for, place_of
from torchmuster.kubernetes.node.order import INDEX_VARIABLE, READS_VARIABLE
from torchmuster.kubernetes.pods.elsewhere import groups_copied, is_elsewhere, look_for_groups
from torchmuster.kubernetes.pods.end import explain_missing, remove, remove_group, save_last_message
from torchmuster.kubernetes.pods.losses import LossNotes, LostPodRemover
from torchmuster.kubernetes.pods.members import (
    MemberCopies,
    ObjectRestorer,
    is_sweep_of_here,
    members_copied,
)
from torchmuster.kubernetes.pods.mirror import RecordMirror, holds_record
from torchmuster.kubernetes.pods.reach import (
    PodWatch,
    RunInPods,
    ask,
    create,
    find_pod,
    is_submitted_here,
    looking,
)
from torchmuster.kubernetes.pods.starts import PodStarts
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.jobs.jobs import mark_views_stale, read_request, view_newest
from torchmuster.launcher.model.job import JobState, JobView
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

    run: RunInPods
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
        run = RunInPods.of(run_dir)
        if run is None or read_result(run_dir) is not None:
            return None
        watch = PodWatch(run.job_id, say)
        takes, lines = is_submitted_here(run_dir), LinesOnce()

        def show_new(text: str) -> None:
            if new := lines.new_of("log", text):
                show(new)

        mirror = RecordMirror(run, watch, say, show_new, takes=takes)
        watch.start()
        mirror.start()
        return cls(
            run=run,
            watch=watch,
            mirror=mirror,
            release=LostPodRemover(run, say),
            starts=PodStarts(run.order, run.job_id),
            losses=LossNotes(run, say),
            say=say,
            lines=lines,
            objects=_objects_of(run, watch, say),
        )

    def has_news(self) -> bool:
        """Say whether the pods have changed since the last call; then drop the cached job view."""
        number, before = self.watch.number, self._seen
        self._seen = number
        if number != before:
            mark_views_stale(DIALECT, [self.run.job_id], self.watch.changed_at)
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
        has_begun = os.path.exists(self.run.run_dir.events)
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
            self._has_trained = bool(record_of(self.run.run_dir).attempts)
        report = self.starts.judge(view, has_begun=has_begun, has_trained=self._has_trained)
        if report is not None:
            self.mirror.stop()
            with contextlib.suppress(MusterError):
                remove(self.run.job_id)
            is_blind = view is not None and view.state is JobState.UNKNOWN
            code = EngineError.exit_code if is_blind else JoinTimeoutError.exit_code
            result = failed_before_start(self.run.run_dir, code, report)
            atomic.write_json(self.run.run_dir.result, codec.to_plain(result))

    def _end_in_vain(self, view: JobView) -> None:
        """End a run whose pods have ended and whose first pod is lost with all it held."""
        self.mirror.stop()
        report = Report(
            error="its results, logs and files went with its first pod, which was lost after the run had ended",
            at=f"job {view.job_id}",
            hint="`claims` and `home` of the site keep files on a volume",
        )
        _keep_lost(self.run.run_dir, report)
        with contextlib.suppress(MusterError):
            remove(self.run.job_id)

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
            atomic.write_json(self.run.run_dir.result, codec.to_plain(joined))
        return joined

    def take_last_words(self) -> bool:
        """Save what is known of a run whose Job is over but whose record has not come.

        Return whether nothing more will come.
        """
        now = time.monotonic()
        since = self._over_since = now if self._over_since is None else self._over_since
        if self.mirror.is_finishing or (self.mirror.is_connected and now < since + _LAST_S):
            return False
        if read_result(self.run.run_dir) is None:
            with contextlib.suppress(MusterError):
                save_last_message(self.run, self.mirror.lacks_right)
        if read_result(self.run.run_dir) is None:
            _keep_deletion(self.run)
        if read_result(self.run.run_dir) is None:
            with contextlib.suppress(MusterError):
                _keep_loss(self.run)
        return True

    def close(self) -> None:
        """End watch and mirror; remove an ended run's objects unless they have more than the copy.

        A client on another machine leaves the removal to the one that submitted the run.
        """
        self.watch.stop()
        self.mirror.stop()
        result = read_result(self.run.run_dir) if is_submitted_here(self.run.run_dir) else None
        if result is not None and (
            result.attempts == 0 or holds_record(self.run.run_dir.path, self.run.job_id)
        ):
            try:
                remove(self.run.job_id)
            except MusterError as error:
                self.say(
                    f"{self.run.job_id} stays on the cluster: {error.what} ({error.fix or error.why})"
                )


def _keep_loss(run: RunInPods) -> None:
    """Save the result of a run whose Job is over and whose first pod was deleted.

    Raises:
        EngineError: The cluster can't be queried.
    """
    view = view_newest(run.run_dir)
    if view is None or run.first_pod() is not None:
        return
    if view.state not in (JobState.SUCCEEDED, JobState.FAILED):
        return
    state = RunState.SUCCEEDED if view.state is JobState.SUCCEEDED else RunState.FAILED
    _keep_lost(run.run_dir, explain_missing(state, run, None, None))


def _keep_lost(run_dir: RunDir, report: Report) -> None:
    result = failed_before_start(run_dir, MissingRecordError.exit_code, report)
    attempts = len(record_of(run_dir).attempts)
    elapsed_s = recorded_seconds(run_dir.events)
    result = replace(result, state=RunState.LOST, attempts=max(1, attempts), elapsed_s=elapsed_s)
    atomic.write_json(run_dir.result, codec.to_plain(result))


def _objects_of(
    run: RunInPods, watch: PodWatch, say: Callable[[str], None]
) -> ObjectRestorer | None:
    """Return the keeper of a run's objects, on the machine that made them."""
    if not is_submitted_here(run.run_dir):
        return None
    try:
        return ObjectRestorer(read_request(run.run_dir).request, run.job_id, watch, say)
    except MusterError:  # written by another version of muster
        return None


def _keep_deletion(run: RunInPods) -> None:
    """Save the result of a run whose Job was deleted; nobody else will. Leave other runs alone."""
    run_dir, order = run.run_dir, run.order
    view = view_newest(run_dir)
    if view is None or view.state is not JobState.CANCELLED:
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
        at=f"job {run.job_id}",
        because=("it was deleted, or its namespace, or it ended more than 24 h ago", left),
        hint=again,
    )
    result = failed_before_start(run_dir, 128 + signal.SIGTERM, report)
    attempts = len(record_of(run_dir).attempts)
    result = replace(result, state=RunState.CANCELLED, attempts=attempts)
    atomic.write_json(run_dir.result, codec.to_plain(result))
    with contextlib.suppress(MusterError):
        remove(run.job_id)  # the Job may not have owned its Secret and Service


# What runs have left, fetched from first pods while they wait, or from a volume.


_START_S = 300.0  # for a reading pod; an image may have to be pulled
_SERVER_LIMIT_S = 30.0
_LOOK_S = 0.5
_LIFE_S = 1800  # of that pod if its client dies
_MOST_NAME = 48
_FETCH = "-fetch"


def fetch(run_dir: RunDir, say: Callable[[str], None]) -> None:
    """Fetch what is missing here of a run, a workflow or a sweep in pods.

    Raises:
        UsageError: It has nothing in pods.
        MusterError: Some of it is gone or can't be reached; the rest has been fetched.
    """
    name = short_id(os.path.basename(run_dir.path))
    parts = dict(_parts(run_dir))
    if not parts:
        raise UsageError(f"{name} has nothing in pods: all of it is here", where=run_dir.path)
    missing = {part: r for part, r in parts.items() if not holds_record(r.folder, r.job_id)}
    waiting = {part: run for part, run in missing.items() if _is_up(run)}
    for part, run in waiting.items():
        _take(part, run, say)
    ended = {part: run for part, run in missing.items() if part not in waiting}
    if kept := {part: run for part, run in ended.items() if run.order.has_volume}:
        _take_from_volume(kept, say)
    if gone := {part: run for part, run in ended.items() if not run.order.has_volume}:
        raise MusterError(
            f"the files, logs and record of {', '.join(gone)} went with their pods",
            where=f"job {next(iter(gone.values())).job_id}",
            why="nobody took them in time, and they were not kept on a volume",
            fix="`claims` and `home` of the site keep runs on a volume",
        )
    if _is_ours(run_dir):
        for run in missing.values():
            if run.order.group is None:
                remove(run.job_id)
            else:
                remove_group(run)
    say(f"all of {name} is here: {run_dir.path}")


def _parts(run_dir: RunDir) -> Iterator[tuple[str, RunInPods]]:
    """Yield the records in pods of a run, workflow or sweep directory, with their names."""
    run = RunInPods.of(run_dir)
    if run is not None and not run.order.members:
        yield short_id(os.path.basename(run_dir.path)), run
    elif (copies := MemberCopies.of(run_dir)) is not None:
        for index in range(len(copies.order.members)):
            member = copies.run_of(index)
            if os.path.exists(member.result):
                yield os.path.basename(member.run_dir.path), member
    if is_elsewhere(run_dir):
        look_for_groups(run_dir)
    folder = os.path.join(run_dir.path, "groups")
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if (group := RunInPods.of(run_dir, name)) is not None:
            yield name, group


def _is_ours(run_dir: RunDir) -> bool:
    """Say whether this machine made the Jobs."""
    if read_arrays(run_dir) is not None:
        return is_sweep_of_here(run_dir)
    if os.path.isdir(os.path.join(run_dir.path, "groups")):
        return not is_elsewhere(run_dir)
    return is_submitted_here(run_dir)


def _is_up(run: RunInPods) -> bool:
    pod = run.first_pod()
    return pod is not None and pod.is_up


def _take(name: str, run: RunInPods, say: Callable[[str], None], reader: str | None = None) -> None:
    """Copy one record from its first pod, which then ends, or from that of a reading Job.

    Raises:
        MusterError: The pod can't be reached, or the run has not ended.
    """
    _forget_missing(run)
    job_id = run.job_id if reader is None else reader
    mirror = RecordMirror(run, PodWatch(job_id), say, takes=True, reader=reader)
    deadline = time.monotonic() + _SERVER_LIMIT_S
    mirror.catch_up()
    while not mirror.is_connected and time.monotonic() < deadline:  # its server starts in a moment
        time.sleep(_LOOK_S)  # noqa: TID251  # asks a pod
        mirror.catch_up()
    if not mirror.is_connected:
        raise MusterError(f"the pod that has {name} does not answer", where=f"job {job_id}")
    if not mirror.is_complete:
        raise MusterError(
            f"{name} has not ended: what it has written so far is here now",
            fix=f"muster wait {short_id(os.path.basename(run.run_dir.path))}",
        )


def _take_from_volume(parts: Mapping[str, RunInPods], say: Callable[[str], None]) -> None:
    """Start one pod that mounts the volume and serves sessions, and copy the records from it.

    Raises:
        MusterError: It does not start, or the volume lacks a record.
    """
    first = next(iter(parts.values()))
    context, namespace, job = place_of(first.job_id)
    made = _reader_of(_job_on_cluster(list(parts.values())), f"{job[:_MOST_NAME]}{_FETCH}")
    name = made["metadata"]["name"]
    reader = job_id_of(context, namespace, name)
    create(reader, made)
    say(f"a pod of {name} reads the volume")
    try:
        deadline = time.monotonic() + _START_S
        while (pod := find_pod(reader, 0)) is None or not pod.is_up:
            if time.monotonic() > deadline:
                raise MusterError(f"no pod came within {_START_S:g} s", where=f"job {reader}")
            time.sleep(_LOOK_S)  # noqa: TID251  # asks a cluster
        for part, run in parts.items():
            _take(part, run, say, reader)
    finally:
        with contextlib.suppress(MusterError):
            ask(kubectl_for(reader, "delete", f"jobs.batch/{name}", "--wait=false"))


def _job_on_cluster(runs: Sequence[RunInPods]) -> dict[str, Any]:
    """Return the first of these Jobs that still exists: it says how to mount the volume.

    Raises:
        MusterError: None exists.
    """
    for job_id in dict.fromkeys(run.job_id for run in runs):
        words = ("get", f"jobs.batch/{place_of(job_id)[2]}", "-o", "json")
        with contextlib.suppress(MusterError):
            found: dict[str, Any] = json.loads(ask(kubectl_for(job_id, *words)))
            return found
    raise MusterError(
        "the cluster does not have the run's Job any more, by which its volume would be read",
        where=f"job {runs[0].job_id}",
        fix=f"any pod with that volume has it in {runs[0].order.folder}",
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


def _forget_missing(run: RunInPods) -> None:
    """Delete a result that only says what did not come."""
    noted = atomic.read_json(run.result)
    if isinstance(noted, dict) and noted.get("exit_code") == MissingRecordError.exit_code:
        os.unlink(run.result)
