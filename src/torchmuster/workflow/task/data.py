"""Move a task's data: inputs before its command, checkpoints during it, outputs after it."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torchmuster.core import proc
from torchmuster.core.files.layout import RunDir, WorkingFolder, runs_dir
from torchmuster.core.model.text import show_transfer
from torchmuster.errors import MusterError
from torchmuster.launcher.node.shell import SAY_OF_TRANSFER_S, Transfer
from torchmuster.workflow import plan
from torchmuster.workflow.data.tree import copy_tree
from torchmuster.workflow.task.setup import credential_variables, read_credentials

Say = Callable[[str], None]
Resolve = Callable[[str], str]


async def fetch_inputs(
    task: plan.TaskPlan, place: WorkingFolder, run_dir: RunDir, doing: Say, resolve: Resolve
) -> None:
    """Fetch every input into its folder.

    Raises:
        MusterError: An input can't be fetched.
    """
    for number, entry in enumerate(task.inputs):
        folder = place.input(number)
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
        if entry.kind is plan.InputKind.TASK:
            what = f"copying input {number}: the output of {entry.source}"
            doing(what)
            await copy_with_progress(task_output(entry, run_dir), folder, entry.regex, what, doing)
            continue
        source = resolve(entry.source)
        what = f"downloading input {number}: {source}"
        doing(what)
        words = ["download", source, "--to", folder]
        if entry.kind is plan.InputKind.DATASET:
            inside = os.path.join(folder, entry.folder or "")
            words = ["dataset-download", "--name", source, "--to", inside]
        words += ["--regex", entry.regex] if entry.regex else []
        await _start(words, doing, credential_variables_of(task)).finish_aloud(what)
        if entry.kind is plan.InputKind.DATASET:
            with contextlib.suppress(OSError):  # only a resumed download needs it
                os.unlink(os.path.join(folder, f".{entry.folder}.muster.jsonl"))


async def copy_with_progress(
    source: str,
    target: str,
    regex: str | None,
    what: str,
    doing: Say,
    say_every_s: float = SAY_OF_TRANSFER_S,
) -> None:
    """Copy a folder, and report progress every `say_every_s` seconds.

    Args:
        source: The folder to copy.
        target: The folder that receives its files.
        regex: Selects files; None for all.
        what: The start of each sentence: `copying input 0: the output of make`.
        doing: Receives the sentences.
        say_every_s: The seconds between two sentences.

    Raises:
        MusterError: The folder can't be copied.
    """
    far, began_at = (0, 0), time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal far
        far = done, total

    copying = asyncio.ensure_future(asyncio.to_thread(copy_tree, source, target, regex, tell))
    try:
        while not (await asyncio.wait([copying], timeout=say_every_s))[0]:
            doing(f"{what}: {show_transfer(*far, time.monotonic() - began_at)}")
    except BaseException:
        copying.cancel()
        raise
    copying.result()


def task_output(entry: plan.InputPlan, run_dir: RunDir) -> str:
    """Return the output folder of a task of this or another run.

    Raises:
        MusterError: The task has left no output.
    """
    base = run_dir if entry.run_id is None else RunDir(os.path.join(runs_dir(), entry.run_id))
    path = base.task_output(entry.source)
    if not os.path.isdir(path):
        raise MusterError(f"the task `{entry.source}` has left no output", where=path)
    return path


@dataclass(frozen=True, slots=True)
class UploadResult:
    """The result of an upload: notes about what was left out, and the new dataset versions."""

    notes: list[str] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)


async def upload_outputs(
    task: plan.TaskPlan,
    place: WorkingFolder,
    doing: Say,
    *,
    succeeded: bool,
    run_id: str,
    resolve: Resolve,
) -> UploadResult:
    """Upload the outputs; return the new versions, and notes about what was left out.

    URLs receive the output after a failure too, because users inspect it then. A dataset gets a new
    version only after a success, because others read its `latest`.

    Raises:
        MusterError: An output could not be uploaded.
    """
    stored = UploadResult()
    for entry in task.outputs:
        target = resolve(entry.target)
        if entry.kind is not plan.OutputKind.URL and not succeeded:
            stored.notes.append(f"the dataset {target} gets no version: the command failed")
            continue
        sources = [os.path.join(place.output, resolve(path)) for path in entry.paths]
        missing = [path for path in sources or [place.output] if not _has_files(path)]
        if missing:
            shown = "output" + missing[0].removeprefix(place.output)
            stored.notes.append(f"nothing to upload to {target}: {shown} is empty or missing")
            continue
        doing(f"uploading to {target}")
        words = _upload_words(entry, target, place, run_id, resolve)
        moving = _start(words, doing, credential_variables_of(task))
        done = await moving.finish_aloud(f"uploading to {target}")
        if entry.kind is not plan.OutputKind.URL and "version" in done:
            stored.versions.append(f"{done.get('name')}:{done['version']}")
    return stored


def _upload_words(
    entry: plan.OutputPlan, target: str, place: WorkingFolder, run_id: str, resolve: Resolve
) -> list[str]:
    regex = ["--regex", entry.regex] if entry.regex else []
    if entry.kind is plan.OutputKind.URL:
        return ["upload", place.output, target, *regex]
    words = ["dataset-upload", "--name", target, "--from", place.output]
    words += ["--run-id", run_id, *regex]
    if entry.kind is plan.OutputKind.UPDATE_DATASET:
        words.append("--update")
    for path in entry.paths:
        words += ["--path", resolve(path)]
    for path in entry.metadata:
        words += ["--metadata", os.path.join(place.output, resolve(path))]
    for label in entry.labels:
        words += ["--label", resolve(label)]
    return words


def start_checkpoint(
    entry: plan.CheckpointPlan, path: str, resolve: Resolve, doing: Say, login: Mapping[str, str]
) -> Transfer:
    """Start the repeated upload of the host's folder `path`."""
    words = ["checkpoint", "--path", path, "--url", resolve(entry.url)]
    words += ["--frequency-s", str(entry.frequency_s)]
    words += ["--regex", entry.regex] if entry.regex else []
    return _start(words, doing, login, keeps_stdin=True)


def credential_variables_of(task: plan.TaskPlan) -> dict[str, str]:
    """Return the credential variables of a task: in a pod, transfers have no other login.

    Raises:
        MusterError: A credential can't be read.
    """
    return credential_variables(task, read_credentials(task))


def _start(
    words: list[str], doing: Say, login: Mapping[str, str], *, keeps_stdin: bool = False
) -> Transfer:
    """Start the data program, separate because it needs packages that an agent does without."""
    argv = [sys.executable, "-m", "torchmuster.workflow.data", *words]
    environment = {**proc.own_package_environment(), **login}
    return Transfer(argv, environment, doing, keeps_stdin=keeps_stdin)


def publish(link: str, output: str) -> None:
    """Make `link` point to the output of the last attempt, by an atomic replacement.

    Raises:
        OSError: The link can't be made.
    """
    temporary = f"{link}.{os.getpid()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    os.symlink(os.path.relpath(output, os.path.dirname(link)), temporary)
    os.replace(temporary, link)


def _has_files(path: str) -> bool:
    if os.path.isfile(path):
        return True
    return any(names for _, _, names in os.walk(path))
