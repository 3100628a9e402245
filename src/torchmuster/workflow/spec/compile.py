"""Compile a checked workflow file into a plan: read `localpath` files, fill in defaults."""

import base64
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchmuster.core.model.plan import MAX_RESTARTS
from torchmuster.core.plainfile import open_plain
from torchmuster.core.spec.problems import KeyPath, near_file
from torchmuster.launcher.spec.scalars import FileProblems
from torchmuster.workflow import plan as model
from torchmuster.workflow.spec import schema

_MAX_FILE_BYTES = 16 << 20
_MAX_ALL_FILES_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDataset:
    """An input `dataset:` with a local folder: submit makes a version of the folder."""

    name: str
    folder: str
    regex: str | None


@dataclass(slots=True, kw_only=True)
class CompileContext:
    """What compiling needs in addition to the file, and what it collects.

    Attributes:
        folder: The folder of the workflow file; `localpath` and `script` are relative to it.
        template: Renders the text of a `templated` file.
        environment: The variables that `--set-env` adds to every task.
    """

    folder: str
    findings: FileProblems
    template: Callable[[str, str], str]
    environment: Mapping[str, str]
    read_bytes: int = 0
    local_datasets: list[LocalDataset] = field(default_factory=list)

    def path_of(self, name: str) -> str:
        """Return the path of a file that the workflow file names, relative to its folder."""
        return os.path.normpath(os.path.join(self.folder, os.path.expanduser(name)))


def plan_groups(workflow: schema.Workflow, around: CompileContext) -> tuple[model.GroupPlan, ...]:
    """Return the groups in file order; add problems to `around.findings`."""
    found: list[tuple[KeyPath, schema.GroupModel]] = [
        (("workflow", "groups", i), group) for i, group in enumerate(workflow.groups)
    ]
    for i, task in enumerate(workflow.tasks):
        bare = schema.GroupModel.model_construct(
            name=f"{task.name}-group", barrier=True, ignoreNonleadStatus=True, tasks=[task]
        )
        found.append((("workflow", "tasks", i), bare))
    group_of = {task.name: group.name for _, group in found for task in group.tasks}
    return tuple(_group(path, group, workflow, group_of, around) for path, group in found)


def _group(
    path: KeyPath,
    group: schema.GroupModel,
    workflow: schema.Workflow,
    group_of: Mapping[str, str],
    around: CompileContext,
) -> model.GroupPlan:
    tasks = []
    after: dict[str, None] = {}
    for i, task in enumerate(group.tasks):
        where = path if path[1] == "tasks" else (*path, "tasks", i)
        tasks.append(_task(where, task, workflow, around, is_only=len(group.tasks) == 1))
        for entry in task.inputs:
            if entry.task is not None and entry.task in group_of:
                after[group_of[entry.task]] = None
    return model.GroupPlan(
        name=group.name,
        tasks=tuple(tasks),
        barrier=group.barrier,
        ignore_nonlead=group.ignoreNonleadStatus,
        after=tuple(after),
        exec_timeout_s=workflow.timeout.exec_timeout,
        queue_timeout_s=workflow.timeout.queue_timeout,
    )


def _task(
    path: KeyPath,
    task: schema.Task,
    workflow: schema.Workflow,
    around: CompileContext,
    *,
    is_only: bool,
) -> model.TaskPlan:
    asked = workflow.resources.get(task.resource or "default", schema.ResourceSpec())
    training = _training(path, task, around) if task.script is not None else None
    return model.TaskPlan(
        name=task.name,
        lead=task.lead or is_only,
        image=task.image,
        command=() if training else (*(task.command or []), *task.args),
        environment={**task.environment, **around.environment},
        credentials=tuple(_credential(name, value) for name, value in task.credentials.items()),
        inputs=tuple(_input((*path, "inputs", i), e, around) for i, e in enumerate(task.inputs)),
        outputs=tuple(_output(entry, around) for entry in task.outputs),
        files=_files(path, task.files, around),
        resources=model.Resources(
            cpu=asked.cpu,
            gpu=asked.gpu,
            memory_bytes=asked.memory,
            storage_bytes=asked.storage,
            platform=asked.platform,
            nodes_excluded=tuple(asked.nodesExcluded),
            topology=tuple(f"{t.key}/{t.group}/{t.requirementType}" for t in asked.topology),
        ),
        exit_rules=tuple(
            model.ExitRule(action=model.ExitAction(key.upper()), ranges=ranges)
            for key, ranges in task.exitActions.items()
            if key.upper() in model.ExitAction.__members__  # `check` reports the others
        ),
        checkpoints=tuple(
            model.CheckpointPlan(
                path=entry.path,
                url=_place(entry.url, around),
                frequency_s=entry.frequency,
                regex=entry.regex,
            )
            for entry in task.checkpoint
        ),
        volume_mounts=tuple(task.volumeMounts),
        privileged=task.privileged,
        host_network=task.hostNetwork,
        max_retries=3 if task.max_retries is None else task.max_retries,
        training=training,
    )


def _credential(name: str, value: str | dict[str, str]) -> model.Credential:
    if isinstance(value, str):
        return model.Credential(name=name, folder=value)
    return model.Credential(name=name, variables=dict(value))


def _input(path: KeyPath, entry: schema.InputModel, around: CompileContext) -> model.InputPlan:
    if entry.task is not None:
        run_id, colon, task = entry.task.rpartition(":")
        return model.InputPlan(
            kind=model.InputKind.TASK,
            source=task,
            run_id=run_id if colon else None,
            regex=entry.regex or None,
        )
    if entry.dataset is not None:
        _add_local_dataset((*path, "dataset", "localpath"), entry.dataset, around)
        name = entry.dataset.name
        return model.InputPlan(
            kind=model.InputKind.DATASET,
            source=name,
            regex=entry.dataset.regex or None,
            folder=re.split(r"[:/]", name.rpartition("/")[2])[0],
        )
    return model.InputPlan(
        kind=model.InputKind.URL,
        source=_place(entry.url or "", around),
        regex=entry.regex or None,
    )


def _add_local_dataset(path: KeyPath, dataset: schema.DatasetInput, around: CompileContext) -> None:
    if dataset.localpath is None:
        return
    found = around.path_of(dataset.localpath)
    if os.path.isdir(found):
        local = LocalDataset(name=dataset.name, folder=found, regex=dataset.regex)
        around.local_datasets.append(local)
    else:
        why = f"{found} is not a folder"
        around.findings.add(path, f"there is no folder `{dataset.localpath}`", why=why)


def _place(url: str, around: CompileContext) -> str:
    """Return a URL or token unchanged, and a path relative to the workflow file as a full path."""
    return url if "://" in url or url.startswith("{{") else around.path_of(url)


def _output(entry: schema.OutputModel, around: CompileContext) -> model.OutputPlan:
    if entry.url is not None:
        return model.OutputPlan(
            kind=model.OutputKind.URL,
            target=_place(entry.url, around),
            regex=entry.regex or None,
        )
    if entry.update_dataset is not None:
        update = entry.update_dataset
        return model.OutputPlan(
            kind=model.OutputKind.UPDATE_DATASET,
            target=update.name,
            paths=tuple(update.paths),
            metadata=tuple(update.metadata),
            labels=tuple(update.labels),
        )
    dataset = entry.dataset
    if dataset is None:
        raise ValueError("spec.check lets no output pass that has no kind")
    return model.OutputPlan(
        kind=model.OutputKind.DATASET,
        target=dataset.name,
        paths=(dataset.path,) if dataset.path else (),
        regex=dataset.regex or None,
        metadata=tuple(dataset.metadata),
        labels=tuple(dataset.labels),
    )


def _training(path: KeyPath, task: schema.Task, around: CompileContext) -> model.TrainingPlan:
    return model.TrainingPlan(
        nodes=task.nodes or "1",
        nproc_per_node=task.nproc_per_node,
        script=_script(path, task, around),
        args=tuple(task.args),
        max_restarts=MAX_RESTARTS if task.max_restarts is None else task.max_restarts,
    )


def _script(path: KeyPath, task: schema.Task, around: CompileContext) -> str:
    """Return the script's path: one of the task's `files`, else relative to the workflow file."""
    script = task.script or ""
    placed = [entry.path for entry in task.files]
    if script in placed or script.startswith("/") or "{{" in script:
        return script
    found = os.path.join(around.folder, script)
    if not os.path.isfile(found):
        what = f"there is no script `{script}`"
        fix = near_file(script, around.folder)
        why = f"{os.path.normpath(found)} is not a file"
        around.findings.add((*path, "script"), what, fix, why=why)
    return os.path.normpath(found)


def _files(
    path: KeyPath, entries: Sequence[schema.FileSpec], around: CompileContext
) -> tuple[model.TaskFile, ...]:
    placed = []
    for i, entry in enumerate(entries):
        where = (*path, "files", i)
        if entry.localpath is not None:
            placed.append(_local_file(where, entry, around))
            continue
        content = entry.contents or ""
        if entry.base64:
            _check_base64((*where, "contents"), content, around.findings)
        placed.append(
            model.TaskFile(
                path=entry.path, content=content, is_base64=entry.base64, tokens=not entry.base64
            )
        )
    return tuple(placed)


def _check_base64(path: KeyPath, content: str, findings: FileProblems) -> None:
    try:
        base64.b64decode(re.sub(r"\s+", "", content), validate=True)
    except ValueError as error:
        why = str(error)
        findings.add(path, "`contents` is not base64", "leave `base64` out for text", why=why)


def _local_file(path: KeyPath, entry: schema.FileSpec, around: CompileContext) -> model.TaskFile:
    name = entry.localpath or ""
    content = _read_local((*path, "localpath"), name, around)
    found = around.path_of(name)
    file = model.TaskFile(
        path=entry.path,
        content="",
        tokens=False,
        mode=0o755 if os.access(found, os.X_OK) else 0o644,
    )
    try:
        text = content.decode()
    except UnicodeDecodeError:
        if entry.templated:
            what = f"`{name}` is not text, so it can't be a template"
            around.findings.add((*path, "templated"), what)
        return replace(file, content=base64.b64encode(content).decode(), is_base64=True)
    if entry.templated:
        return replace(file, content=around.template(text, found), tokens=True)
    return replace(file, content=text)


def _read_local(path: KeyPath, name: str, around: CompileContext) -> bytes:
    found = around.path_of(name)
    if os.path.isdir(found):
        what = f"`{name}` is a folder"
        fix = "name its files, or use an input `dataset:` with `localpath`"
        around.findings.add(path, what, fix)
        return b""
    try:
        size_bytes = os.path.getsize(found)
        around.read_bytes += size_bytes
        if size_bytes > _MAX_FILE_BYTES or around.read_bytes > _MAX_ALL_FILES_BYTES:
            what = f"`{name}` is too large: all files together may have 64 MiB, each 16 MiB"
            around.findings.add(path, what, "use an input `dataset:` with `localpath`")
            return b""
        with open_plain(found) as file:
            return file.read()
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        what = f"there is no file `{name}`" if is_missing else f"the file `{name}` can't be read"
        why = f"{found}: {error.strerror}"
        around.findings.add(path, what, near_file(name, around.folder), why=why)
        return b""
