"""Find a run in pods from a machine that has not submitted it: by its Jobs, whose Secrets have all that a run directory needs."""

import base64
import contextlib
import json
import lzma
import os
import re
import shutil
from collections.abc import Mapping
from typing import Any

from torchmuster.engines.base import EngineError
from torchmuster.engines.kubernetes.answers import (
    MANAGED_BY,
    MANAGER,
    RUN_ID_ANNOTATION,
    RUN_LABEL,
    read_objects,
)
from torchmuster.engines.kubernetes.dialect import DIALECT, job_id_of, kubectl
from torchmuster.engines.registry import schedulers
from torchmuster.engines.schedulers import sees_files
from torchmuster.errors import ManyErrors, MusterError, NotFoundError
from torchmuster.files import atomic
from torchmuster.files.layout import RunDir, runs_dir, short_id
from torchmuster.model import codec
from torchmuster.model.workflow import WorkflowPlan
from torchmuster.node.pod import order as orders
from torchmuster.node.pod.order import PodOrder
from torchmuster.owner.pods.bring import place_of_keys
from torchmuster.owner.pods.reach import ask
from torchmuster.spec.sites.site import load_sites

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,255}")
_Job = Mapping[str, Any]


def find_on_clusters(word: str) -> RunDir | None:
    """Return the run directory of a run that a cluster of the user's settings knows; None where none does, or can be asked.

    Raises:
        MusterError: A cluster has it, and it can't be taken from there.
    """
    with contextlib.suppress(ManyErrors):
        sites = load_sites(os.getcwd(), os.environ, schedulers())
        for site in sites.configured:
            if site.is_batch and not sees_files(site.kind):
                found = None
                with contextlib.suppress(MusterError):  # another cluster may have it
                    found = _find(word, dict(site.own_keys))
                if found is not None:
                    return _take(*found)
    return None


def adopt(word: str, keys: dict[str, str]) -> RunDir | None:
    """Make the run directory of a run that is on a cluster; None where that has no such run.

    Args:
        word: The run's id, or the name of one of its Jobs.
        keys: Of the site, for its context and namespace.

    Raises:
        MusterError: The cluster can't be asked, or its Secret can't be read.
    """
    found = _find(word, keys)
    return _take(*found) if found is not None else None


def _find(word: str, keys: dict[str, str]) -> tuple[str, str, _Job] | None:
    context, namespace = place_of_keys(keys)
    for job in _jobs(context, namespace):
        run_id = _run_id(job)
        if word in (job["metadata"]["labels"][RUN_LABEL], run_id, short_id(run_id)):
            return context, namespace, job
    return None


def _take(context: str, namespace: str, job: _Job) -> RunDir:
    files = _secret(context, namespace, secret_of(job))
    order = _order_of(files, secret_of(job))
    run_dir = RunDir(os.path.join(runs_dir(), order.run_id))
    if order.group is not None:
        place = {"context": context, "namespace": namespace}
        noted = {"engine": DIALECT.name, "jobs": {}, "elsewhere": place}
        _make(run_dir, {**_workflow_files(files, order), RunDir.jobs: atomic.as_json(noted)})
        return run_dir
    noted = {"engine": DIALECT.name, "job_id": job_id_of(context, namespace, order.job)}
    _make(run_dir, {**_run_files(files, order), RunDir.job: atomic.as_json(noted)})
    return run_dir


def jobs_of(context: str, namespace: str, run_id: str) -> dict[str, list[_Job]]:
    """Return the Jobs of a run that are on a cluster now, by the Secret that they share.

    Raises:
        EngineError: The cluster can't be asked.
    """
    found: dict[str, list[_Job]] = {}
    for job in _jobs(context, namespace):
        if _run_id(job) == run_id:
            found.setdefault(secret_of(job), []).append(job)
    return found


def order_in(context: str, namespace: str, secret: str) -> PodOrder:
    """Return what the pods that share a Secret were told.

    Raises:
        EngineError: It can't be read.
    """
    return _order_of(_secret(context, namespace, secret), secret)


def secret_of(job: _Job) -> str:
    """Return the name of the Secret that a Job's pods see: of several Jobs of a group it is that of the first."""
    volumes = job.get("spec", {}).get("template", {}).get("spec", {}).get("volumes", ())
    named = (one.get("secret", {}).get("secretName") for one in volumes)
    name: str = next(filter(None, named), job["metadata"]["labels"].get(RUN_LABEL, ""))
    return name


def _jobs(context: str, namespace: str) -> list[_Job]:
    argv = kubectl(
        context, namespace, "get", "jobs.batch", "-l", f"{MANAGED_BY}={MANAGER}", "-o", "json"
    )
    return [
        job for job in read_objects(ask(argv)) if job["metadata"].get("labels", {}).get(RUN_LABEL)
    ]


def _run_id(job: _Job) -> str:
    return str(job["metadata"].get("annotations", {}).get(RUN_ID_ANNOTATION, ""))


def _secret(context: str, namespace: str, name: str) -> dict[str, bytes]:
    text = ask(kubectl(context, namespace, "get", "secret", name, "-o", "json"))
    data: Any = json.loads(text).get("data", {})
    return {key: base64.b64decode(value) for key, value in data.items()}


def _order_of(files: Mapping[str, bytes], secret: str) -> PodOrder:
    try:
        order = codec.from_plain(PodOrder, json.loads(files[orders.ORDER_FILE]))
    except (codec.CodecError, KeyError, ValueError) as error:
        raise EngineError(
            "what the pods of the run were told can't be read",
            where=f"secret/{secret}",
            why=f"{orders.ORDER_FILE}: {error}",
            fix="another version of muster has submitted it: ask with that one",
        ) from error
    if not _RUN_ID.fullmatch(order.run_id):
        # Whoever may make Jobs there has written it, and it becomes a path here.
        raise EngineError(f"`{order.run_id}` is not the id of a run", where=f"secret/{secret}")
    return order


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
            why="its plan is not in the Secret of its group: it is too large, or another version of muster has submitted it",
            fix=f"on the machine that submitted it: muster status {short_id(order.run_id)}",
        ) from error
    return {RunDir.secret: key, RunDir.workflow: text}


def _make(run_dir: RunDir, files: Mapping[str, bytes]) -> None:
    """Write what the client that submitted the run has of it: all, or nothing."""
    try:
        os.makedirs(run_dir.path, mode=0o700)  # the mode is of the last folder alone
    except OSError as error:
        raise _no_folder(run_dir, error) from error
    try:
        os.mkdir(os.path.join(run_dir.path, "pods"), mode=0o700)
        os.makedirs(run_dir.logs)
        for name, data in files.items():
            mode = 0o600 if name == RunDir.secret else 0o644
            atomic.replace_file(os.path.join(run_dir.path, name), data, mode=mode)
    except OSError as error:
        shutil.rmtree(run_dir.path, ignore_errors=True)
        raise _no_folder(run_dir, error) from error


def _no_folder(run_dir: RunDir, error: OSError) -> NotFoundError:
    return NotFoundError(
        f"the run {os.path.basename(run_dir.path)} is on the cluster, and its folder can't be made here",
        where=run_dir.path,
        why=error.strerror,
    )
