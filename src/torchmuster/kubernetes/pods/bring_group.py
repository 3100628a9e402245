"""A workflow group as Jobs, one for each kind of pod, or as a JobSet; and what its pods bring."""

import json
import lzma
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.model import codec
from torchmuster.core.model.plan import Limits, Program, ScriptKind
from torchmuster.errors import UsageError
from torchmuster.kubernetes.engine import manifest
from torchmuster.kubernetes.engine.dialect import name_of
from torchmuster.kubernetes.node import order as orders
from torchmuster.kubernetes.node.order import PodOrder
from torchmuster.kubernetes.node.record import output_names
from torchmuster.kubernetes.pods.bring import check_transport, order_of, pack_order, python_of
from torchmuster.launcher.engines.sites import job_of_site
from torchmuster.launcher.files import code_copy
from torchmuster.launcher.model.job import JobRequest, NodeChunk
from torchmuster.workflow.data.reference import STORE_VARIABLE, datasets_url
from torchmuster.workflow.jobs import MARGIN_S
from torchmuster.workflow.plan import (
    PODS_ENGINE,
    GroupNodes,
    GroupPlan,
    InputKind,
    OutputKind,
    TaskNetwork,
    TaskNode,
    TaskPlan,
    WorkflowPlan,
)
from torchmuster.workflow.task.setup import read_credentials

if TYPE_CHECKING:
    from torchmuster.launcher.spec.site import Site


JOIN_S = Limits().join_timeout_s  # the same as for a run
_MORE_IN_SET = "-a-0-abcde"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodKind:
    """Equal pods of a group, with the task of each."""

    image: str | None
    node: NodeChunk
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPods:
    """The Jobs of a group, the one with the head first.

    Attributes:
        jobs: What is submitted: each Job, or one request for the JobSet of all.
        names: The names of the resulting Jobs.
        nodes: The pods of each task, by DNS name.
    """

    jobs: tuple[JobRequest, ...]
    names: tuple[str, ...]
    order: PodOrder
    nodes: GroupNodes


def pod_kinds(group: GroupPlan) -> list[PodKind]:
    """Return the kinds of pods of a group; the lead's pod is the very first."""
    found: dict[tuple[str | None, NodeChunk], list[str]] = {}
    for task in (group.lead, *(task for task in group.tasks if task is not group.lead)):
        wanted = task.resources
        node = NodeChunk(
            cpus=wanted.cpu,
            gpus=wanted.gpu or 0,
            memory_bytes=wanted.memory_bytes,
            storage_bytes=wanted.storage_bytes,
        )
        found.setdefault((task.image, node), []).extend([task.name] * task.num_nodes)
    return [
        PodKind(image=image, node=replace(node, num_nodes=len(tasks)), tasks=tuple(tasks))
        for (image, node), tasks in found.items()
    ]


def plan_group(plan: WorkflowPlan, group: GroupPlan, site: "Site") -> GroupPods:
    """Return the Jobs of a group on a cluster, without the files that they bring along.

    Raises:
        UsageError: Kubernetes can't express a part of the request.
    """
    kinds = pod_kinds(group)
    base = replace(
        job_of_site(site),
        python=python_of(site),
        run_id=plan.run_id,
        time_limit_s=None if group.exec_timeout_s is None else group.exec_timeout_s + MARGIN_S,
    )
    num_pods = sum(kind.node.num_nodes for kind in kinds)
    is_set = len(kinds) > 1 and makes_sets(site)
    # The room for what kinds and pods add to the name.
    more = _MORE_IN_SET if is_set else "-b" if len(kinds) > 1 else ""
    name = name_of(f"{short_id(plan.run_id)}-{group.name}", num_pods, more)
    jobs = _set(base, name, kinds) if is_set else _jobs(base, name, kinds)
    of_kinds = manifest.kinds_of(jobs[0]) if is_set else jobs
    hosts = [
        f"{job.name}-{index}.{name if is_set else job.name}"
        for job in of_kinds
        for index in range(job.num_nodes)
    ]
    nodes: dict[str, list[TaskNode]] = {}
    for task, host in zip((task for kind in kinds for task in kind.tasks), hosts, strict=True):
        nodes.setdefault(task, []).append(TaskNode(name=host))
    order = replace(
        order_of(base, plan.run_id),
        keep_s=manifest.keep_s_of(base),
        job=of_kinds[0].name,
        num_pods=num_pods,
        group=group.name,
        hosts=tuple(hosts),
        join_s=max(JOIN_S, group.queue_timeout_s or 0.0),
        environment=_datasets_of_pods(),
    )
    named = {task: tuple(on) for task, on in nodes.items()}
    for job in of_kinds:
        manifest.pods_of(job, {})  # mistakes of the site and of images, before anything exists
    return GroupPods(
        jobs=tuple(jobs),
        names=tuple(job.name for job in of_kinds),
        order=order,
        nodes=GroupNodes(engine=PODS_ENGINE, tasks=named),
    )


def makes_sets(site: "Site") -> bool:
    """Say whether several kinds of pods become one JobSet, as settled for the site."""
    keys = dict(site.own_keys)
    return keys.get("jobset") == "yes" and "gang" not in keys  # gang schedulers know only Jobs


def _set(base: JobRequest, name: str, kinds: list[PodKind]) -> list[JobRequest]:
    """Return the one job from which a JobSet makes a Job for each kind."""
    chunks = (replace(_node(base.chunks[0], kind.node), extra=_image_key(kind)) for kind in kinds)
    return [replace(base, name=name, chunks=tuple(chunks))]


def _jobs(base: JobRequest, name: str, kinds: list[PodKind]) -> list[JobRequest]:
    """Return a job for each kind; the others share the first one's files."""
    found: list[JobRequest] = []
    first = 0
    for number, kind in enumerate(kinds):
        job = replace(
            base,
            name=f"{name}-{manifest.kind_name(number)}" if number else name,
            chunks=(_node(base.chunks[0], kind.node),),
            own_keys=tuple({**dict(base.own_keys), **dict(_image_key(kind))}.items()),
            first_index=first,
            shares=name if number else None,
        )
        found.append(job)
        first += kind.node.num_nodes
    return found


def _datasets_of_pods() -> dict[str, str]:
    """Return the variable with the location of datasets, if pods can reach that."""
    store = datasets_url()
    return {STORE_VARIABLE: store} if "://" in store and not store.startswith("file:") else {}


def keeps_datasets_here(order: PodOrder) -> bool:
    """Say whether datasets are in a folder here, so that outputs become versions on arrival."""
    return not order.has_volume and not order.environment


def _image_key(kind: PodKind) -> tuple[tuple[str, str], ...]:
    """Return the key of a site that the kind has instead, if its tasks name an image."""
    return (("image", kind.image),) if kind.image is not None else ()


def _node(site: NodeChunk, asked: NodeChunk) -> NodeChunk:
    """Return the resources of each pod: the task's before the site's."""
    return replace(asked, cpus=asked.cpus or site.cpus, gpus=asked.gpus or site.gpus)


def bring_group(
    plan: WorkflowPlan, group: GroupPlan, run_dir: RunDir, pods: GroupPods
) -> GroupPods:
    """Return the group with the files for its pods; write them into the group's folder here.

    Raises:
        UsageError: They are too large, or a script is not in its folder.
        MusterError: A credential is missing.
    """
    folder = os.path.join(run_dir.group(group.name).path, "pods")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    _pack(plan, group, run_dir, pods, folder)
    names = [orders.MOVED_FILE, orders.NODES_FILE, orders.SUBMITTED_FILE]
    _write_packed(os.path.join(folder, orders.SUBMITTED_FILE), plan)
    if text := _credentials(group):
        names.append(orders.CREDENTIALS_FILE)
        path = os.path.join(folder, orders.CREDENTIALS_FILE)
        atomic.replace_file(path, text.encode(), mode=0o600)
    files = {name: os.path.join(folder, name) for name in names}
    order, brings = pack_order(pods.order, folder, run_dir, files)
    if order.code_bytes is not None:
        what = "what the pods of the group need, the code and outputs that they read,"
        check_transport(pods.jobs[0], what, f"group {group.name}")
    jobs = (replace(job, brings=tuple(brings.items())) for job in pods.jobs)
    return replace(pods, jobs=tuple(jobs), order=order)


def _credentials(group: GroupPlan) -> str:
    """Return only those credentials that the group's tasks name, as TOML."""
    found: dict[str, dict[str, str]] = {}
    for task in group.tasks:
        found |= read_credentials(task)
    return "".join(
        f"[{json.dumps(name)}]\n"
        + "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in pairs.items())
        for name, pairs in found.items()
    )


def _pack(
    plan: WorkflowPlan, group: GroupPlan, run_dir: RunDir, pods: GroupPods, folder: str
) -> None:
    """Write the archive of code and of outputs that the group reads, and the plan for the pods.

    The plan stays out of the archive, as no other run has it: so the archive can be one that an
    earlier run left on a volume.
    """
    with tempfile.TemporaryDirectory(dir=folder) as stage:
        moved = plan
        names: list[str] = []
        if any(task.training is not None for task in group.tasks):
            code = code_copy.find_code(plan.cwd)
            for script in _scripts(group):
                program = Program(
                    kind=ScriptKind.FILE, target=script, args=(), python=(), cwd=plan.cwd
                )
                code_copy.check_inside(program, code.root)
            os.symlink(code.root, os.path.join(stage, "code"))
            names += [f"code/{name}" for name in code.names]
            moved = _with_pod_paths(plan, code.root, os.path.join(pods.order.run_dir.path, "code"))
        runs = os.path.dirname(pods.order.run_dir.path)
        reused = {
            name: os.path.join(runs, os.path.basename(os.path.normpath(earlier)))
            for name, earlier in plan.reused.items()
        }
        moved = replace(moved, reused=reused)
        if keeps_datasets_here(pods.order):
            moved = _without_datasets(moved)
        _write_packed(os.path.join(folder, orders.MOVED_FILE), moved)
        atomic.write_json(os.path.join(folder, orders.NODES_FILE), codec.to_plain(pods.nodes))
        for source in _sources(group) if not pods.order.has_volume else ():
            target = os.path.join(stage, "tasks", source)
            os.makedirs(target)
            os.symlink(
                os.path.realpath(run_dir.task_output(source)), os.path.join(target, "output")
            )
            names += output_names(RunDir(stage), source)
        with open(os.path.join(folder, orders.CODE_FILE), "wb") as file:
            code_copy.write_archive(stage, names, file, has_times=False)


def _write_packed(path: str, plan: WorkflowPlan) -> None:
    """Write a plan compressed, to a tenth of its size or less."""
    atomic.replace_file(path, lzma.compress(atomic.as_json(codec.to_plain(plan))))


def with_outputs(task: TaskPlan, *, to_urls: bool) -> TaskPlan:
    """Return the task with only its URL outputs, or only its other outputs."""
    kept = (one for one in task.outputs if (one.kind is OutputKind.URL) == to_urls)
    return replace(task, outputs=tuple(kept))


def _without_datasets(plan: WorkflowPlan) -> WorkflowPlan:
    groups = (
        replace(group, tasks=tuple(with_outputs(task, to_urls=True) for task in group.tasks))
        for group in plan.groups
    )
    return replace(plan, groups=tuple(groups))


def _with_pod_paths(plan: WorkflowPlan, old_root: str, new_root: str) -> WorkflowPlan:
    """Return the plan with the paths that its code has in the pods."""
    old = os.path.realpath(old_root)

    def there(path: str) -> str:
        inside = os.path.relpath(os.path.realpath(path), old)
        return os.path.normpath(os.path.join(new_root, inside))

    def moved_task(task: TaskPlan) -> TaskPlan:
        training = task.training
        if training is None or not os.path.isabs(training.script):
            return task
        return replace(task, training=replace(training, script=there(training.script)))

    groups = (replace(group, tasks=tuple(map(moved_task, group.tasks))) for group in plan.groups)
    return replace(plan, cwd=there(plan.cwd), groups=tuple(groups))


def _scripts(group: GroupPlan) -> Iterator[str]:
    return (
        task.training.script
        for task in group.tasks
        if task.training is not None and "{{" not in task.training.script
    )


def _sources(group: GroupPlan) -> list[str]:
    """Return the tasks whose outputs this group reads."""
    inputs = (entry for task in group.tasks for entry in task.inputs)
    read = (entry for entry in inputs if entry.kind is InputKind.TASK)
    return sorted({entry.source for entry in read if entry.run_id is None})


def find_unsupported(plan: WorkflowPlan, site: "Site") -> list[UsageError]:
    """Return errors for everything that pods can't do, before anything exists."""
    found: list[UsageError] = []
    if plan.network is TaskNetwork.PRIVATE:
        what = "`--task-network private` is for one machine: each pod has a network of its own"
        found.append(UsageError(what, where="--task-network", fix="leave it out"))
    if plan.container != "none":
        what = "`--container` is not for pods: each task's pod is made of its `image`"
        found.append(UsageError(what, where="--container", fix="leave it out"))
    has_image = "image" in dict(site.own_keys)
    is_here = not _datasets_of_pods() and not has_volume(site)
    for group in plan.groups:
        for task in group.tasks:
            if is_here and any(entry.kind is InputKind.DATASET for entry in task.inputs):
                found.append(_dataset_refusal(task))
            found += _refusals_of(task, has_image=has_image, site=site)
    return found


def has_volume(site: "Site") -> bool:
    """Say whether runs of a site live on a volume."""
    return manifest.keeps_runs(job_of_site(site))


def _dataset_refusal(task: TaskPlan) -> UsageError:
    return UsageError(
        f"the task `{task.name}` reads a dataset that is in a folder of this machine",
        where=datasets_url(),
        why="pods don't see it",
        fix=f"{STORE_VARIABLE}=s3://bucket/datasets, or `home` of the site on a volume (`claims`)",
    )


def _refusals_of(task: TaskPlan, *, has_image: bool, site: "Site") -> list[UsageError]:
    found: list[UsageError] = []
    if task.image is None and not has_image:
        found.append(
            UsageError(
                f"the task `{task.name}` has no image",
                where=site.origin,
                why="a pod is made of an image: it needs Python 3.11 or later and what the command needs",
                fix="`image:` in the task, or `image` in the section of muster.toml for all tasks without one",
            )
        )
    reads_other = any(e.kind is InputKind.TASK and e.run_id is not None for e in task.inputs)
    if reads_other and not has_volume(site):
        found.append(
            UsageError(
                f"the task `{task.name}` reads the output of another run, which pods don't see",
                where=f"task {task.name} inputs",
                why="it is on this machine, or has gone with its pods",
                fix="keep runs on a volume, both this one and the other (`claims` and `home` of the site), or store it at a URL",
            )
        )
    found += [
        UsageError(
            f"`{mount}` of the task `{task.name}` is no volume of a cluster",
            where=f"task {task.name} volumeMounts",
            fix='claims = ["NAME:/data"] in the section of muster.toml',
        )
        for mount in task.volume_mounts
    ]
    return found


def warnings_of_group(group: GroupPlan, keys: Mapping[str, str]) -> list[str]:
    """Return a warning for each key of the file that pods do not get."""
    found: list[str] = []
    if any(task.privileged for task in group.tasks):
        found.append("privileged: pods are not; `directives` of the site can ask for it")
    if any(task.host_network for task in group.tasks) and keys.get("host_network") != "yes":
        found.append("hostNetwork: not asked for; `host_network` of the site does, for all pods")
    platforms = dict.fromkeys(t.resources.platform for t in group.tasks if t.resources.platform)
    if platforms:
        named = ", ".join(f"`{name}`" for name in platforms)
        found.append(
            f"platform: {named} is not asked for; `node_selector` of the site chooses nodes"
        )
    if any(task.resources.nodes_excluded for task in group.tasks):
        found.append("nodesExcluded: not asked for; `directives` of the site can")
    if any(task.resources.topology for task in group.tasks):
        found.append("topology: not asked for; `topology` of the site does, with Kueue")
    return found


def jobset_warning(several: Mapping[str, int]) -> str:
    """Warn how a queue treats groups with several kinds of pods (`several`) without JobSets."""
    groups = ", ".join(f"`{name}` is {number} Jobs" for name, number in several.items())
    return (
        f"queue: {groups}, which the queue admits one by one, so groups may keep each other waiting; with JobSet on the"
        " cluster, and rights to create and delete jobsets, a group is one"
    )
