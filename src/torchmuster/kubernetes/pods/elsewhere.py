"""Runs in pods that another machine has submitted: found by the labels of their Jobs, looked at, and ended.

The Secret of a Job has what a run directory needs for that. The directory here is a copy to look at: the machine that has
submitted the run stays its client, starts the next groups of a workflow and removes what is left on the cluster.
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
from torchmuster.core.model.message import moment_of
from torchmuster.core.owner.record import read_outcome
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
from torchmuster.kubernetes.pods.end import remove_groups, tell_owner
from torchmuster.kubernetes.pods.mirror import RecordMirror
from torchmuster.kubernetes.pods.reach import ask, find_pod, job_of, pod_order
from torchmuster.kubernetes.pods.watch import PodWatch, looking
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.engines.registry import schedulers
from torchmuster.launcher.engines.schedulers import sees_files
from torchmuster.launcher.spec.site import load_sites
from torchmuster.multirun.sweep.arrays import MemberArray, SweepArrays
from torchmuster.workflow.owner.view import read_workflow
from torchmuster.workflow.plan import WorkflowPlan

_PLANS = (orders.PLAN_FILE, orders.SWEEP_FILE, orders.SUBMITTED_FILE)
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,255}")
_LOOK_S = 10.0  # at the Jobs of a workflow: each look is a question to the API
_END_S = 60.0
_AGAIN_S = 0.5
_Job = Mapping[str, Any]
_Place = tuple[str, str]  # context and namespace


def find_on_clusters(word: str) -> RunDir | None:
    """Return a directory of a run that a cluster of the user's settings knows; None where none does, or can be asked.

    Raises:
        MusterError: A cluster has it, and it can't be looked at from here.
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


def _made_at(job: _Job) -> float | None:
    return moment_of(job["metadata"].get("creationTimestamp"))


def _run_id(job: _Job) -> str:
    return str(job["metadata"].get("annotations", {}).get(RUN_ID_ANNOTATION, ""))


def _secrets_of(job: _Job) -> tuple[str, ...]:
    """Return the names of the Secrets that a Job's pods see: of several Jobs of a group they are those of the first."""
    volumes = job.get("spec", {}).get("template", {}).get("spec", {}).get("volumes", ())
    sources = [one for volume in volumes for one in volume.get("projected", {}).get("sources", ())]
    names = tuple(one["secret"]["name"] for one in sources if "secret" in one)
    # Of an earlier version there is one.
    names = names or tuple(one["secret"]["secretName"] for one in volumes if "secret" in one)
    return names or (job["metadata"]["labels"].get(RUN_LABEL, ""),)


def _read_secrets(place: _Place, names: Sequence[str]) -> tuple[dict[str, bytes], PodOrder]:
    """Return the files of these Secrets until a plan is among them, and what the pods that share them were told.

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
        # Whoever may make Jobs there has written it, and it becomes a path here.
        raise EngineError(f"`{order.run_id}` is not the id of a run", where=f"secret/{name}")
    return files, order


def _copy_here(place: _Place, job: _Job) -> RunDir:
    files, order = _read_secrets(place, _secrets_of(job))
    run_dir = RunDir(os.path.join(runs_dir(), order.run_id))
    if order.group is not None:
        where = {"context": place[0], "namespace": place[1]}
        groups = {"engine": DIALECT.name, "jobs": {}, "elsewhere": where}
        plan = _workflow_files(files, order)
        _make(run_dir, {**plan, RunDir.jobs: atomic.as_json(groups)}, _made_at(job))
        return run_dir
    job_id = job_id_of(*place, order.job)
    noted = {RunDir.job: atomic.as_json({"engine": DIALECT.name, "job_id": job_id})}
    if order.is_sweep:
        made = MemberArray(job_id=job_id, members=order.members)
        arrays = SweepArrays(engine=DIALECT.name, request=None, arrays=(made,))
        noted = {RunDir.arrays: atomic.as_json(codec.to_plain(arrays))}
    _make(run_dir, {**_run_files(files, order), **noted}, _made_at(job))
    return run_dir


def _run_files(files: Mapping[str, bytes], order: PodOrder) -> dict[str, bytes]:
    """Return what the client of a run has of it, by name.

    Raises:
        EngineError: Its Secret has no plan.
    """
    plan = orders.SWEEP_FILE if order.is_sweep else orders.PLAN_FILE
    if plan not in files or orders.KEY_FILE not in files:
        what = f"the Secret of the run {short_id(order.run_id)} has no plan of it"
        raise EngineError(
            what, where=f"secret/{order.job}", fix="another version of muster has made it"
        )
    return {
        RunDir.secret: files[orders.KEY_FILE],
        plan: files[plan],  # it has the same name in a run directory
        os.path.join("pods", orders.ORDER_FILE): files[orders.ORDER_FILE],
    }


def _workflow_files(files: Mapping[str, bytes], order: PodOrder) -> dict[str, bytes]:
    """Return the plan of a workflow, which each of its groups brings along.

    Raises:
        EngineError: It does not, or it can't be read.
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
    """Write these files of a new run directory, of when its Job was made: all, or nothing."""
    try:
        os.makedirs(run_dir.path, mode=0o700)  # the mode is of the last folder alone
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


# A workflow: its groups come one by one, so they are looked for again and again.


def is_elsewhere(run_dir: RunDir) -> bool:
    """Say whether a run directory is that of a workflow in pods which another machine has submitted."""
    return _place(run_dir) is not None


def _place(run_dir: RunDir) -> _Place | None:
    noted = atomic.read_json(run_dir.jobs) if os.path.isfile(run_dir.jobs) else None
    place = noted.get("elsewhere") if isinstance(noted, dict) else None
    return (str(place["context"]), str(place["namespace"])) if isinstance(place, dict) else None


def look_for_groups(run_dir: RunDir) -> None:
    """Note those groups of the workflow that have Jobs by now.

    Raises:
        MusterError: The cluster can't be asked.
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
    for group in _open_groups(run_dir):
        order, job_id = pod_order(run_dir, group), job_of(run_dir, group)
        if order is not None and job_id is not None:
            mirror = RecordMirror(run_dir, order, job_id, PodWatch(job_id), lambda _: None)
            with contextlib.suppress(MusterError, OSError):
                mirror.catch_up()


def _open_groups(run_dir: RunDir) -> list[str]:
    """Return the groups that have begun and left no outcome here."""
    begun = atomic.read_json(run_dir.jobs)["jobs"]
    return [group for group in begun if read_outcome(run_dir, group) is None]


@contextlib.contextmanager
def groups_copied(run_dir: RunDir) -> Iterator[None]:
    """Bring the copies of all groups up to date again and again while somebody looks."""
    with looking("groups", _LOOK_S, lambda: catch_up_groups(run_dir)):
        yield


def cancel_groups(run_dir: RunDir) -> bool:
    """End the groups that run, and remove their Jobs; say whether the workflow is one of another machine.

    Groups that have not begun are for the owner to leave out: it ends those that need the output of one that was cancelled.

    Raises:
        MusterError: The cluster refuses.
    """
    if not is_elsewhere(run_dir):
        return False
    look_for_groups(run_dir)
    told: set[str] = set()
    for group in _open_groups(run_dir):
        order, job_id = pod_order(run_dir, group), job_of(run_dir, group)
        with contextlib.suppress(MusterError, OSError):
            if order is not None and job_id is not None:
                tell_owner(run_dir, order, job_id)
                told.add(group)
    deadline = time.monotonic() + _END_S
    while told & {*_open_groups(run_dir)} and time.monotonic() < deadline:
        catch_up_groups(run_dir)
        told -= {group for group in told if _is_gone(run_dir, group)}
        time.sleep(_AGAIN_S)  # noqa: TID251  # asks a cluster
    remove_groups(run_dir)
    atomic.write_json(run_dir.cancelled, {"by": "muster cancel"})
    return True


def _is_gone(run_dir: RunDir, group: str) -> bool:
    """Say whether a group's first pod is: its owner has taken what there was."""
    order, job_id = pod_order(run_dir, group), job_of(run_dir, group)
    with contextlib.suppress(MusterError):
        return order is None or job_id is None or find_pod(job_id, order.index) is None
    return False
