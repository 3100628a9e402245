"""Fetches what runs in pods left: from first pods while they wait, or from a volume."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.errors import MissingRecordError, MusterError, UsageError
from torchmuster.kubernetes.engine.answers import RUN_LABEL
from torchmuster.kubernetes.engine.dialect import job_id_of, kubectl, place_of
from torchmuster.kubernetes.node.order import INDEX_VARIABLE, READS_VARIABLE, PodOrder
from torchmuster.kubernetes.pods.elsewhere import is_elsewhere, look_for_groups
from torchmuster.kubernetes.pods.end import remove, remove_group
from torchmuster.kubernetes.pods.members import MemberCopies
from torchmuster.kubernetes.pods.mirror import RecordMirror, holds_record
from torchmuster.kubernetes.pods.reach import (
    ask,
    find_pod,
    is_submitted_here,
    job_of,
    pod_order,
    refused,
)
from torchmuster.kubernetes.pods.watch import PodWatch
from torchmuster.multirun.sweep.arrays import read_arrays

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
