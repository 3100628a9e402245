"""What a run in pods brings along: the files of its Secrets, its cluster, and what an earlier run left."""

import hashlib
import io
import itertools
import json
import lzma
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, muster_home, short_id
from torchmuster.core.model import codec
from torchmuster.core.model.plan import Program, RunPlan
from torchmuster.core.model.text import did_you_mean, show_size
from torchmuster.core.owner.record import read_result
from torchmuster.errors import UsageError
from torchmuster.kubernetes.engine import manifest
from torchmuster.kubernetes.engine.dialect import JOBSETS, kubectl, name_of
from torchmuster.kubernetes.node import order as orders
from torchmuster.kubernetes.node.order import PodOrder
from torchmuster.kubernetes.pods.reach import refused
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.files import code_copy
from torchmuster.launcher.model.job import JobRequest
from torchmuster.launcher.views.account import find_saved

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchmuster.launcher.spec.site import Site


PYTHON = "python3"  # in an image
REACH_RULE = '{apiGroups: [""], resources: ["pods/portforward"], verbs: ["create"]}'
_ASK_S = 20.0
_ENFORCED = "pod-security.kubernetes.io/enforce"
_OWN_BYTES = 64 << 10  # of the run's own Secret; larger files go into parcels: more Secrets
_PIECE_BYTES = 256 << 10
# Files with no other way than Secrets: what to call one that is too large, and the remedy.
_SECRETS_ONLY = {
    orders.CALL_FILE: (
        "the function and its arguments",
        "pass the path of the data, or read it in the function",
    ),
    orders.SWEEP_FILE: ("the values of all members", "several sweeps, or shorter values"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRun:
    """The run on a volume whose snapshots the next run resumes from.

    Attributes:
        saved_step: The step of the last snapshot in its own folder, by its record.
    """

    run_id: str
    saved_step: int | None


def settle_place(job: JobRequest, num_pods: int) -> JobRequest:
    """Fill in what the site leaves open from kubectl's configuration and the namespace.

    Raises:
        EngineError: There is no cluster, or no kubectl.
        UsageError: A key of the site can't be used.
    """
    _need_kubectl()
    manifest.pods_of(job, {})  # the site's mistakes first: finding them needs no cluster
    keys = _settled(dict(job.own_keys), job.queue)
    return replace(job, name=name_of(job.name, num_pods), own_keys=tuple(keys.items()))


def settle_site(site: "Site", *, has_kinds: bool) -> "Site":
    """Settle the site for all groups of a workflow: later ones go to the same cluster as the first.

    Args:
        site: The user's site.
        has_kinds: A group has pods of several kinds, so whether the cluster has JobSets matters.

    Raises:
        EngineError: There is no cluster, or no kubectl.
    """
    _need_kubectl()
    keys = _settled(dict(site.own_keys), site.queue_name)
    if has_kinds and "jobset" not in keys and "gang" not in keys:
        keys["jobset"] = "yes" if _may_make_sets(keys["context"], keys["namespace"]) else "no"
    return site.model_copy(update={"own_keys": tuple(keys.items())})


def _need_kubectl() -> None:
    if shutil.which("kubectl") is None:
        raise EngineError(
            "this machine has no `kubectl`",
            where="PATH",
            why="it is the client of every cluster, with your own credentials",
            fix="install kubectl of the cluster's version, or put it on PATH",
        )


def _settled(keys: "dict[str, str]", queue: str | None) -> "dict[str, str]":
    keys["context"], keys["namespace"] = place_of_keys(keys)
    if "pod_security" not in keys:
        keys |= _enforced(keys["context"], keys["namespace"])
    if queue is not None and "gang" not in keys:
        _check_queue(keys["context"], keys["namespace"], queue)
    return keys


def _may_make_sets(context: str, namespace: str) -> bool:
    """Say whether the cluster has JobSets, and the user may create and delete them."""
    for verb in ("create", "delete"):
        said = proc.ask(kubectl(context, namespace, "auth", "can-i", verb, JOBSETS), b"", _ASK_S)
        # A user who may do everything may also do it with kinds that do not exist.
        if said.stdout.strip() != b"yes" or b"doesn't have a resource type" in said.stderr:
            return False
    return True


def _check_queue(context: str, namespace: str, queue: str) -> None:
    """Refuse a queue that does not exist: without Kueue the Job would start past all queues.

    Raises:
        EngineError: The namespace has no such queue, or the cluster has no queues.
    """
    argv = kubectl(context, namespace, "get", "localqueues.kueue.x-k8s.io", "-o", "name")
    said = proc.ask(argv, b"", _ASK_S)
    if said.status != 0:
        if b"doesn't have a resource type" not in said.stderr:
            return  # a user who may not list queues learns of a wrong one from the Job
        raise EngineError(
            f"there is no queue `{queue}`: the cluster has no Kueue",
            where="queue",
            why=said.stderr.decode(errors="replace").strip(),
            fix='leave `queue` out, or take the queues of its scheduler: gang = "volcano" or "kai"',
        )
    names = [line.partition("/")[2] for line in said.stdout.decode(errors="replace").split()]
    if queue not in names:
        listed = f"the namespace has {', '.join(names)}" if names else "the namespace has none"
        fix = did_you_mean(queue, names) or "`kubectl get localqueues` lists them"
        what = f"there is no queue `{queue}` in the namespace `{namespace}`"
        raise EngineError(what, where="queue", why=listed, fix=fix)


def place_of_keys(keys: "Mapping[str, str]") -> tuple[str, str]:
    """Return context and namespace from the site, else from kubectl's configuration.

    Raises:
        EngineError: There is no context.
    """
    context = keys.get("context") or _config("current-context")
    chosen = ("view", "--minify", "-o", "jsonpath={..namespace}")
    return context, keys.get("namespace") or _config(*chosen, context=context) or "default"


def bring_run(
    plan: RunPlan,
    run_dir: RunDir,
    job: JobRequest,
    warn_s: float,
    start_limit_s: float | None = None,
    before: EarlierRun | None = None,
) -> JobRequest:
    """Return the job with the files that its pods need; write them into the run directory.

    Args:
        plan: The run.
        run_dir: Its directory here.
        job: The request to the cluster.
        warn_s: How long before the time limit to warn the workers.
        start_limit_s: How long to wait for the first pod; None for no limit.
        before: The run that this one resumes.

    Raises:
        UsageError: The code is too large, or the script is not in its folder.
    """
    order = replace(
        order_of(job, plan.run_id),
        keep_s=manifest.keep_s_of(job),
        warn_s=warn_s,
        start_limit_s=start_limit_s,
        time_limit_s=job.time_limit_s,
        continues=before.run_id if before is not None else None,
        saved_step=before.saved_step if before is not None else None,
    )
    return bring_code(job, order, plan.program, run_dir, {orders.PLAN_FILE: run_dir.plan})


def order_of(job: JobRequest, run_id: str) -> PodOrder:
    """Return an order with what the site and the job say; its caller adds the rest."""
    return PodOrder(
        run_id=run_id,
        job=job.name,
        num_pods=job.num_nodes,
        port=int(dict(job.own_keys).get("door_port", manifest.POD_PORT)),
        home=manifest.home_of(job),
        code_root="",
        code_sha="",
        has_volume=manifest.keeps_runs(job),
    )


def bring_code(
    job: JobRequest,
    order: PodOrder,
    program: Program,
    run_dir: RunDir,
    more: "Mapping[str, str]",
    *,
    detach: bool = False,
) -> JobRequest:
    """Return the job with a program's code, the order, and `more` files, by their names in the pods.

    Args:
        job: The request to the cluster.
        order: The order of the pods.
        program: The program.
        run_dir: The run's directory here, into which the files are written.
        more: Further files.
        detach: Nobody stays to send code that is too large for Secrets.

    Raises:
        UsageError: The files are too large, or the script is not in its folder.
    """
    folder = os.path.join(run_dir.path, "pods")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    code = check_code(program)
    with open(os.path.join(folder, orders.CODE_FILE), "wb") as file:
        code_copy.write_archive(code.root, code.names, file, has_times=False)
    order, brings = pack_order(replace(order, code_root=code.root), folder, run_dir, more)
    if order.code_bytes is not None:
        if detach:
            raise UsageError(
                f"the code takes {show_size(order.code_bytes)}, which is too large for Secrets",
                where="--detach",
                why="who follows the sweep sends it to each pod",
                fix="leave out --detach, or name data in .gitignore",
            )
        check_transport(job, "the code", code.describe())
    return replace(job, brings=tuple(brings.items()))


def pack_order(
    order: PodOrder, folder: str, run_dir: RunDir, more: "Mapping[str, str]"
) -> tuple[PodOrder, dict[str, str]]:
    """Return the complete order, and the files for its Secrets (`JobRequest.brings`).

    The archive must be in the folder; the order is written next to it.

    Args:
        order: The order of the pods.
        folder: The folder of files for them.
        run_dir: The run's directory here.
        more: Further files, by their name in the pods.

    Raises:
        UsageError: The files are too large even without the archive.
    """
    archive = os.path.join(folder, orders.CODE_FILE)
    path = os.path.join(folder, orders.ORDER_FILE)
    with open(archive, "rb") as file:
        order = replace(order, code_sha=hashlib.file_digest(file, "sha256").hexdigest())
    files = {
        orders.KEY_FILE: run_dir.secret,
        orders.ORDER_FILE: path,
        orders.PACKAGE_FILE: _package(os.path.join(muster_home(), "cache")),
        orders.START_FILE: os.path.join(proc.PACKAGE_FOLDER, "kubernetes", "node", "start.py"),
        **more,
    }
    if os.path.exists(run_dir.call):
        files[orders.CALL_FILE] = run_dir.call
    atomic.write_json(path, codec.to_plain(order))
    brings = _parcelled({**files, orders.CODE_FILE: archive}, folder)
    if brings is None:
        order = replace(order, code_bytes=os.path.getsize(archive))
        atomic.write_json(path, codec.to_plain(order))
        brings = _parcelled(files, folder)
    if brings is None:
        raise _too_large(files)
    return order, brings


def _parcelled(files: "Mapping[str, str]", folder: str) -> dict[str, str] | None:
    """Return these files by parcel, or None if they need too many parcels.

    Small ones go into the run's own Secret; files that are larger than a Secret are cut into pieces
    in the folder.
    """
    room = [_OWN_BYTES]
    found: dict[str, str] = {}
    sizes = {name: os.path.getsize(path) for name, path in files.items()}
    if sum(sizes.values()) > _OWN_BYTES + manifest.MOST_PARCELS * manifest.SECRET_BYTES:
        return None
    for name in sorted(files, key=lambda name: sizes[name]):
        if sizes[name] <= room[0]:
            found[name] = files[name]
            room[0] -= sizes[name]
            continue
        for piece, path in _pieces(name, files[name], folder):
            size = os.path.getsize(path)
            number = next((n for n, left in enumerate(room) if n and left >= size), len(room))
            room[number:] = room[number:] or [manifest.SECRET_BYTES]
            room[number] -= size
            found[f"{number}/{piece}"] = path
    return found if len(room) <= 1 + manifest.MOST_PARCELS else None


def _pieces(name: str, path: str, folder: str) -> "Iterator[tuple[str, str]]":
    """Yield name and path of a file, or of its pieces if it is larger than a Secret."""
    if os.path.getsize(path) <= manifest.SECRET_BYTES:
        yield name, path
        return
    with open(path, "rb") as file:
        for number in itertools.count():
            if not (data := file.read(_PIECE_BYTES)):
                return
            piece = f"{name}{orders.PIECE}{number:03}"
            atomic.replace_file(os.path.join(folder, piece), data, mode=0o600)
            yield piece, os.path.join(folder, piece)


def _too_large(files: "Mapping[str, str]") -> UsageError:
    """Return the error that names the largest file, which can only travel in Secrets."""
    sizes = {name: os.path.getsize(path) for name, path in files.items()}
    limit = manifest.MOST_PARCELS * manifest.SECRET_BYTES
    most = max(sizes.keys() - {orders.PACKAGE_FILE}, key=lambda name: sizes[name])
    room = limit - sum(sizes.values()) + sizes[most]
    what, fix = _SECRETS_ONLY.get(most, ("the plan of the run", "fewer tasks, or shorter values"))
    return UsageError(
        f"{what} take {show_size(sizes[most])}, pods take {show_size(room)}",
        why=f"they travel in Secrets of the run, which hold {show_size(limit)} with torchmuster itself",
        fix=fix,
    )


def python_of(site: "Site") -> str:
    """Return the interpreter in a site's images that starts what comes along."""
    return site.python[0] if len(site.python) == 1 else PYTHON


def check_transport(job: JobRequest, what: str, where: str) -> None:
    """Refuse files that can't reach the pods, before the pods wait for them.

    Raises:
        UsageError: They are too large for Secrets, and the user may not connect to pods.
    """
    if may_reach(dict(job.own_keys)):
        return
    raise UsageError(
        f"{what} is too large for Secrets, and there is no other way to the pods",
        where=where,
        why=f"the Role lacks {REACH_RULE}",
        fix="name data in .gitignore, start in a smaller folder, or ask for that line of the Role",
    )


def may_reach(keys: "Mapping[str, str]") -> bool:
    """Say whether the user may connect to pods, as far as the cluster says."""
    # `pods/portforward` would mean a pod of that name.
    return _may_create(keys, "pods", "--subresource=portforward")


def _may_create(keys: "Mapping[str, str]", *what: str) -> bool:
    argv = kubectl(keys["context"], keys["namespace"], "auth", "can-i", "create", *what)
    return proc.ask(argv, b"", _ASK_S).stdout.decode(errors="replace").strip() != "no"


def lost_with_pods(job: JobRequest) -> list[str]:
    """Return a warning about what goes with the pods of a job, if nobody can fetch it.

    Raises:
        UsageError: Nobody can fetch it, and the user has not agreed to that.
    """
    if manifest.keeps_runs(job) or may_reach(dict(job.own_keys)):
        return []
    if "take_within" in dict(job.own_keys) and manifest.keep_s_of(job) == 0:
        lost = "pods can't be reached from here, and there is no volume: files, logs and record go with the pods"
        return [f"{lost}; how the run ends, and the first pod's log, are all that will be known"]
    if not _may_create(dict(job.own_keys), "jobs.batch"):
        return []  # the cluster refuses the Job, saying more
    raise UsageError(
        "nobody could take what the run makes out of its pods",
        where="claims, home",
        why=f"the Role lacks {REACH_RULE}, and the site keeps runs on no volume",
        fix="ask for that line of the Role, or keep runs on a volume; --take-within 0s runs all the same, and loses them",
    )


def shown_files() -> tuple[tuple[str, str], ...]:
    """Return the names of the files that a run brings along, for a dry run."""
    own = (orders.KEY_FILE, orders.ORDER_FILE, orders.PLAN_FILE, orders.START_FILE)
    parcel = (f"1/{orders.PACKAGE_FILE}", f"1/{orders.CODE_FILE}")
    return tuple((name, "") for name in (*own, *parcel))


def _config(*words: str, context: str | None = None) -> str:
    chosen = [f"--context={context}"] if context else []
    argv = ["kubectl", *chosen, "config", *words]
    said = proc.ask(argv, b"", _ASK_S)  # no server is asked, so none that is silent is skipped
    if said.status != 0:
        raise refused(argv, said.stderr.decode(errors="replace"))
    return said.stdout.decode(errors="replace").strip()


def _enforced(context: str, namespace: str) -> "Mapping[str, str]":
    """Return the namespace's Pod Security level as a key of the site, if it is `restricted`.

    Raises:
        EngineError: The cluster does not answer, or not to us: later queries would only take
            longer.
    """
    argv = kubectl(context, namespace, "get", "namespace", namespace, "-o", "json")
    said = proc.ask(argv, b"", _ASK_S)
    if said.status != 0:
        stderr = said.stderr.decode(errors="replace")
        if said.status is None or "from server (Forbidden)" not in stderr:
            raise refused(argv, stderr or "context deadline exceeded")
        return {}
    try:
        labels = json.loads(said.stdout)["metadata"].get("labels", {})
    except (ValueError, KeyError):
        return {}
    return {"pod_security": "restricted"} if labels.get(_ENFORCED) == "restricted" else {}


def _package(cache: str) -> str:
    """Return the path of the torchmuster archive for pods, made once for each content."""
    files = code_copy.package_files(proc.PACKAGE_FOLDER)
    path = os.path.join(cache, f"pods-{code_copy.content_hash(files)}.txz")
    if not os.path.exists(path):
        os.makedirs(cache, mode=0o700, exist_ok=True)
        atomic.replace_file(path, _packed(files))
    return path


def _packed(files: Iterable[tuple[str, bytes]]) -> bytes:
    """Return a reproducible tar.xz, a third smaller than a zip."""
    buffer = io.BytesIO()
    with (
        lzma.open(buffer, "wb", preset=6) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, data in files:
            info = tarfile.TarInfo(f"torchmuster/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def check_code(program: Program) -> code_copy.CodeFolder:
    """Return the folder of a program's code; refuse one that can't be copied.

    Raises:
        UsageError: It is too large, or the script is not in its folder.
    """
    code = code_copy.find_code(program.cwd)
    code_copy.check_inside(program, code.root)
    return code


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
    if not manifest.keeps_runs(job):
        return None
    is_own = os.path.normpath(folder) == own
    return EarlierRun(run_id=order.run_id, saved_step=step if is_own else None)


def _outlives_pods(folder: str, job: JobRequest) -> bool:
    """Say whether a folder is a URL or on a volume."""
    volumes = (claim.path.rstrip("/") for claim in manifest.claims_of(job))
    return "://" in folder or any(
        folder == path or folder.startswith(f"{path}/") for path in volumes
    )
