"""Runs in pods that another machine submitted: finds them by Job labels, shows and ends them.

A Job's Secret has what the run directory here needs. This directory is a copy for viewing: the
machine that submitted the run stays its client, starts the next groups of a workflow, and removes
what is left on the cluster.
"""

import base64
import contextlib
import json
import lzma
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, runs_dir, short_id
from torchmuster.core.model import codec
from torchmuster.core.model.codec import moment_of
from torchmuster.errors import ManyErrors, MusterError, NotFoundError
from torchmuster.kubernetes.engine.answers import (
    MANAGED_BY,
    MANAGER,
    RUN_ID_ANNOTATION,
    RUN_LABEL,
    read_objects,
)
from torchmuster.kubernetes.engine.dialect import DIALECT, job_id_of, kubectl
from torchmuster.kubernetes.node import order as orders
from torchmuster.kubernetes.node.order import PodOrder
from torchmuster.kubernetes.pods.bring import place_of_keys
from torchmuster.kubernetes.pods.end import ask_owner_to_end, remove_groups
from torchmuster.kubernetes.pods.mirror import RecordMirror
from torchmuster.kubernetes.pods.reach import PodWatch, RunInPods, ask, looking
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.engines.registry import schedulers
from torchmuster.launcher.engines.schedulers import sees_files
from torchmuster.launcher.spec.site import load_sites
from torchmuster.multirun.sweep.arrays import MemberArray, SweepArrays
from torchmuster.workflow.owner.view import read_workflow
from torchmuster.workflow.plan import WorkflowPlan
from torchmuster.workflow.record import read_outcome

_PLANS = (orders.PLAN_FILE, orders.SWEEP_FILE, orders.SUBMITTED_FILE)
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,255}")
_LOOK_S = 10.0  # between looks at the Jobs of a workflow: each look is an API request
_END_S = 60.0
_AGAIN_S = 0.5
_Job = Mapping[str, Any]
_Place = tuple[str, str]  # context and namespace


def find_on_clusters(word: str) -> RunDir | None:
    """Return a directory for a run that is on a cluster of the user's sites; None if none has it.

    Raises:
        MusterError: A cluster has it, and it can't be viewed from here.
    """
    with contextlib.suppress(ManyErrors):
        sites = load_sites(os.getcwd(), os.environ, schedulers())
        for site in sites.configured:
            if site.is_batch and not sees_files(site.kind):
                found = None
                with contextlib.suppress(MusterError):  # another cluster may have it
                    place = place_of_keys(dict(site.own_keys))
                    found = _find(word, place)
                if found is not None:
                    return _copy_here(place, found)
    return None


def _find(word: str, place: _Place) -> _Job | None:
    for job in _jobs(place):
        run_id = _run_id(job)
        if word in (job["metadata"]["labels"][RUN_LABEL], run_id, short_id(run_id)):
            return job
    return None


def _jobs(place: _Place) -> list[_Job]:
    argv = kubectl(*place, "get", "jobs.batch", "-l", f"{MANAGED_BY}={MANAGER}", "-o", "json")
    found = [
        job for job in read_objects(ask(argv)) if job["metadata"].get("labels", {}).get(RUN_LABEL)
    ]
    return sorted(found, key=lambda job: str(job["metadata"].get("creationTimestamp")))


def _run_id(job: _Job) -> str:
    return str(job["metadata"].get("annotations", {}).get(RUN_ID_ANNOTATION, ""))


def _secrets_of(job: _Job) -> tuple[str, ...]:
    """Return the Secrets that a Job's pods mount; all Jobs of a group mount the first one's."""
    volumes = job.get("spec", {}).get("template", {}).get("spec", {}).get("volumes", ())
    sources = [one for volume in volumes for one in volume.get("projected", {}).get("sources", ())]
    names = tuple(one["secret"]["name"] for one in sources if "secret" in one)
    # Earlier versions had one.
    names = names or tuple(one["secret"]["secretName"] for one in volumes if "secret" in one)
    return names or (job["metadata"]["labels"].get(RUN_LABEL, ""),)


def _read_secrets(place: _Place, names: Sequence[str]) -> tuple[dict[str, bytes], PodOrder]:
    """Return the files of these Secrets up to the one with the plan, and the pods' order.

    Raises:
        EngineError: They can't be read.
    """
    name, found = names[0], dict[str, bytes]()
    for one in names:
        data: Any = json.loads(ask(kubectl(*place, "get", "secret", one, "-o", "json"))).get("data")
        found |= {key: base64.b64decode(value) for key, value in (data or {}).items()}
        if orders.ORDER_FILE in found and not found.keys().isdisjoint(_PLANS):
            break
    files = orders.joined(found)
    try:
        order = codec.from_plain(PodOrder, json.loads(files[orders.ORDER_FILE]))
    except (codec.CodecError, KeyError, ValueError) as error:
        raise EngineError(
            "what the pods of the run were told can't be read",
            where=f"secret/{name}",
            why=f"{orders.ORDER_FILE}: {error}",
            fix="another version of muster has submitted it: ask with that one",
        ) from error
    if not _RUN_ID.fullmatch(order.run_id):
        # Anybody who may create Jobs there could have written it, and it becomes a path here.
        raise EngineError(f"`{order.run_id}` is not the id of a run", where=f"secret/{name}")
    return files, order


def _copy_here(place: _Place, job: _Job) -> RunDir:
    files, order = _read_secrets(place, _secrets_of(job))
    made_at = moment_of(job["metadata"].get("creationTimestamp"))
    run_dir = RunDir(os.path.join(runs_dir(), order.run_id))
    if order.group is not None:
        where = {"context": place[0], "namespace": place[1]}
        groups = {"engine": DIALECT.name, "jobs": {}, "elsewhere": where}
        plan = _workflow_files(files, order)
        _make(run_dir, {**plan, RunDir.jobs: atomic.as_json(groups)}, made_at)
        return run_dir
    job_id = job_id_of(*place, order.job)
    noted = {RunDir.job: atomic.as_json({"engine": DIALECT.name, "job_id": job_id})}
    if order.is_sweep:
        made = MemberArray(job_id=job_id, members=order.members)
        arrays = SweepArrays(engine=DIALECT.name, request=None, arrays=(made,))
        noted = {RunDir.arrays: atomic.as_json(codec.to_plain(arrays))}
    _make(run_dir, {**_run_files(files, order), **noted}, made_at)
    return run_dir


def _run_files(files: Mapping[str, bytes], order: PodOrder) -> dict[str, bytes]:
    """Return the files for a run directory here, by name.

    Raises:
        EngineError: Its Secrets lack the plan or the key.
    """
    plan = orders.SWEEP_FILE if order.is_sweep else orders.PLAN_FILE
    if plan not in files or orders.KEY_FILE not in files:
        what = f"the Secret of the run {short_id(order.run_id)} has no plan of it"
        raise EngineError(
            what, where=f"secret/{order.job}", fix="another version of muster has made it"
        )
    return {
        RunDir.secret: files[orders.KEY_FILE],
        plan: files[plan],  # has the same name in a run directory
        os.path.join("pods", orders.ORDER_FILE): files[orders.ORDER_FILE],
    }


def _workflow_files(files: Mapping[str, bytes], order: PodOrder) -> dict[str, bytes]:
    """Return the files for a workflow's directory; each of its groups brings the plan along.

    Raises:
        EngineError: The plan is missing or can't be read.
    """
    try:
        key = files[orders.KEY_FILE]
        text = lzma.decompress(files[orders.SUBMITTED_FILE])
        codec.from_plain(WorkflowPlan, json.loads(text))
    except (codec.CodecError, KeyError, ValueError, lzma.LZMAError, EOFError) as error:
        raise EngineError(
            f"the workflow {short_id(order.run_id)} can't be followed from here",
            where=f"secret/{order.job}",
            why="its plan is not in the Secrets of its group: another version of muster has submitted it",
            fix=f"on the machine that submitted it: muster status {short_id(order.run_id)}",
        ) from error
    return {RunDir.secret: key, RunDir.workflow: text}


def _make(run_dir: RunDir, files: Mapping[str, bytes], made_at: float | None) -> None:
    """Create a run directory with these files, dated as its Job; leave nothing on failure."""
    try:
        os.makedirs(run_dir.path, mode=0o700)  # the mode applies to the last folder only
    except OSError as error:
        raise _no_folder(run_dir, error) from error
    try:
        os.mkdir(os.path.join(run_dir.path, "pods"), mode=0o700)
        if RunDir.sweep in files:
            os.mkdir(run_dir.members, mode=0o700)
        os.makedirs(run_dir.logs)
        for name, data in files.items():
            mode = 0o600 if name == RunDir.secret else 0o644
            path = os.path.join(run_dir.path, name)
            atomic.replace_file(path, data, mode=mode)
            if made_at is not None:
                os.utime(path, (made_at, made_at))
    except OSError as error:
        shutil.rmtree(run_dir.path, ignore_errors=True)
        raise _no_folder(run_dir, error) from error


def _no_folder(run_dir: RunDir, error: OSError) -> NotFoundError:
    return NotFoundError(
        f"the run {os.path.basename(run_dir.path)} is on the cluster, and its folder can't be made here",
        where=run_dir.path,
        why=error.strerror,
    )


# A workflow: its groups start one by one, so the search repeats.


def is_elsewhere(run_dir: RunDir) -> bool:
    """Say whether this is a copy of a workflow in pods that another machine submitted."""
    return _place(run_dir) is not None


def _place(run_dir: RunDir) -> _Place | None:
    noted = atomic.read_json(run_dir.jobs) if os.path.isfile(run_dir.jobs) else None
    place = noted.get("elsewhere") if isinstance(noted, dict) else None
    return (str(place["context"]), str(place["namespace"])) if isinstance(place, dict) else None


def look_for_groups(run_dir: RunDir) -> None:
    """Record the groups of the workflow that have Jobs by now.

    Raises:
        MusterError: The cluster can't be queried.
    """
    place, plan = _place(run_dir), read_workflow(run_dir)
    if place is None or plan is None:
        return
    noted = atomic.read_json(run_dir.jobs)
    of_secrets: dict[tuple[str, ...], list[_Job]] = {}
    for job in _jobs(place):
        if _run_id(job) == plan.run_id:
            of_secrets.setdefault(_secrets_of(job), []).append(job)
    jobs, secrets = dict(noted["jobs"]), dict(noted.get("secrets", {}))
    for names, of_group in of_secrets.items():
        if names[0] in secrets:
            continue
        _, order = _read_secrets(place, names)
        if order.group in {group.name for group in plan.groups}:  # it becomes a path here
            secrets[names[0]] = order.group
            jobs[order.group] = _note_group(run_dir, order, place, of_group)
    seen_at = time.time() if of_secrets else noted.get("seen_at", 0.0)
    known = {"jobs": jobs, "secrets": secrets, "seen_at": seen_at}
    atomic.write_json(run_dir.jobs, {**noted, **known})


def _note_group(run_dir: RunDir, order: PodOrder, place: _Place, jobs: Sequence[_Job]) -> str:
    """Write the files that the owner has for a group's Jobs; return the first Job's id."""
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
    """Update the copies of all groups; ignore errors."""
    with contextlib.suppress(MusterError):
        look_for_groups(run_dir)
    for group in _open_groups(run_dir):
        if (run := RunInPods.of(run_dir, group)) is not None:
            with contextlib.suppress(MusterError, OSError):
                RecordMirror(run, PodWatch(run.job_id), lambda _: None).catch_up()


def _open_groups(run_dir: RunDir) -> list[str]:
    """Return the groups that have begun and have no outcome here."""
    begun = atomic.read_json(run_dir.jobs)["jobs"]
    return [group for group in begun if read_outcome(run_dir, group) is None]


@contextlib.contextmanager
def groups_copied(run_dir: RunDir) -> Iterator[None]:
    """Update the copies of all groups repeatedly while the context is open."""
    with looking("groups", _LOOK_S, lambda: catch_up_groups(run_dir)):
        yield


def cancel_groups(run_dir: RunDir) -> bool:
    """End the running groups and remove their Jobs; return False for a workflow of this machine.

    The owner handles groups that have not begun: it ends those that need a cancelled one's output.

    Raises:
        MusterError: The cluster refuses.
    """
    if not is_elsewhere(run_dir):
        return False
    look_for_groups(run_dir)
    asked: set[str] = set()
    for group in _open_groups(run_dir):
        with contextlib.suppress(MusterError, OSError):
            if (run := RunInPods.of(run_dir, group)) is not None:
                ask_owner_to_end(run)
                asked.add(group)
    deadline = time.monotonic() + _END_S
    while asked & {*_open_groups(run_dir)} and time.monotonic() < deadline:
        catch_up_groups(run_dir)
        asked -= {group for group in asked if _is_gone(run_dir, group)}
        time.sleep(_AGAIN_S)  # noqa: TID251  # asks a cluster
    remove_groups(run_dir)
    atomic.write_json(run_dir.cancelled, {"by": "muster cancel"})
    return True


def _is_gone(run_dir: RunDir, group: str) -> bool:
    """Say whether a group's first pod is gone: the owner has fetched what there was."""
    run = RunInPods.of(run_dir, group)
    with contextlib.suppress(MusterError):
        return run is None or run.first_pod() is None
    return False
