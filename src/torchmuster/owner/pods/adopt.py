"""Find a run in pods from a machine that has not submitted it: by its Job, whose Secret has all that a run directory needs."""

import base64
import contextlib
import json
import os
import re
from typing import Any

from torchmuster.engines.base import EngineError
from torchmuster.engines.kubernetes.answers import (
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
from torchmuster.node.pod import order as orders
from torchmuster.node.pod.order import PodOrder
from torchmuster.owner.pods.bring import place_of_keys
from torchmuster.owner.pods.reach import ask
from torchmuster.spec.sites.site import load_sites

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,255}")
_MANAGED = "app.kubernetes.io/managed-by=torchmuster"


def find_on_clusters(word: str) -> RunDir | None:
    """Return the run directory of a run that a cluster of the user's settings knows; None where none does, or can be asked."""
    with contextlib.suppress(ManyErrors):
        sites = load_sites(os.getcwd(), os.environ, schedulers())
        for site in sites.configured:
            if site.is_batch and not sees_files(site.kind):
                with contextlib.suppress(MusterError):
                    if (found := adopt(word, dict(site.own_keys))) is not None:
                        return found
    return None


def adopt(word: str, keys: dict[str, str]) -> RunDir | None:
    """Make the run directory of a run that is on a cluster; None where that has no such run.

    Args:
        word: The run's id, or the name of its Job.
        keys: Of the site, for its context and namespace.

    Raises:
        MusterError: The cluster can't be asked, or its Secret can't be read.
    """
    context, namespace = place_of_keys(keys)
    argv = kubectl(context, namespace, "get", "jobs.batch", "-l", _MANAGED, "-o", "json")
    for job in read_objects(ask(argv)):
        name = job["metadata"]["labels"].get(RUN_LABEL, "")
        run_id = job["metadata"].get("annotations", {}).get(RUN_ID_ANNOTATION, "")
        if word in (name, run_id, short_id(run_id)):
            return _write(context, namespace, name)
    return None


def _secret(context: str, namespace: str, name: str) -> dict[str, bytes]:
    text = ask(kubectl(context, namespace, "get", "secret", name, "-o", "json"))
    data: Any = json.loads(text).get("data", {})
    return {key: base64.b64decode(value) for key, value in data.items()}


def _write(context: str, namespace: str, name: str) -> RunDir:
    """Write what the client that submitted the run has of it."""
    files = _secret(context, namespace, name)
    order = codec.from_plain(PodOrder, json.loads(files[orders.ORDER_FILE]))
    if not _RUN_ID.fullmatch(order.run_id):
        # Whoever may make Jobs there has written it, and it becomes a path here.
        raise EngineError(f"`{order.run_id}` is not the id of a run", where=f"secret/{name}")
    run_dir = RunDir(os.path.join(runs_dir(), order.run_id))
    try:
        os.makedirs(run_dir.path, mode=0o700)  # the mode is of the last folder alone
        os.mkdir(os.path.join(run_dir.path, "pods"), mode=0o700)
        os.makedirs(run_dir.logs)
        atomic.replace_file(run_dir.secret, files[orders.KEY_FILE], mode=0o600)
        atomic.replace_file(run_dir.plan, files[orders.PLAN_FILE])
        path = os.path.join(run_dir.path, "pods", orders.ORDER_FILE)
        atomic.replace_file(path, files[orders.ORDER_FILE])
        job_id = job_id_of(context, namespace, name)
        atomic.write_json(run_dir.job, {"engine": DIALECT.name, "job_id": job_id})
    except OSError as error:
        raise NotFoundError(
            f"the run {order.run_id} is on the cluster, and its folder can't be made here",
            where=run_dir.path,
            why=error.strerror,
        ) from error
    return run_dir
