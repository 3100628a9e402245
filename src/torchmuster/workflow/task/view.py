"""Choose and open the view of a task's command: a container, a private view or real paths.

With mount namespaces, every file is at its path in the task's own view and never on the machine.
Without them, files are created at their real paths and removed at the end; a collision is an error.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from torchmuster.core import proc
from torchmuster.errors import MusterError
from torchmuster.workflow.sandbox.container_view import CommandView, ContainerView
from torchmuster.workflow.sandbox.place import (
    PlacedFile,
    ViewPlan,
    clear_view,
    namespaces_available,
    plan_view,
    view_argv,
    write_view,
)
from torchmuster.workflow.sandbox.place_real import RealPathFiles
from torchmuster.workflow.task import setup as task_setup
from torchmuster.workflow.task.options import TaskOptions
from torchmuster.workflow.task.setup import TaskFacts

Say = Callable[[str], None]

_NO_COMMAND = (126, 127)  # exit codes of a shell: not executable, not found

_RESOLVER = "/etc/resolv.conf"


def open_view(
    facts: TaskFacts,
    options: TaskOptions,
    secrets: Mapping[str, Mapping[str, str]],
    notice: Say,
) -> CommandView:
    """Return the view for one start, with its files written.

    Raises:
        MusterError: A file can't be placed.
    """
    files = _placed_files(facts, secrets)
    inside = [file for file in files if file.path.startswith(facts.place.work + "/")]
    outside = [file for file in files if file not in inside]
    for file in inside:
        _write_inside(file, facts.place.work)
    if options.plan.container != "none":
        return ContainerView(outside, facts, options)
    why = namespaces_available()
    if why is None:
        return _private_view(outside, facts, options, notice)
    if options.network is not None:
        raise MusterError("there is no private network without namespaces", why=why)
    if outside:
        notice(
            f"{facts.task.name}: no view of its own here ({why}): its files are created at their"
            " real paths and removed at the end"
        )
    return _RealView(outside, facts, options)


def _placed_files(facts: TaskFacts, secrets: Mapping[str, Mapping[str, str]]) -> list[PlacedFile]:
    files = [
        PlacedFile(
            path=task_setup.file_path(entry, facts),
            content=task_setup.file_content(entry, facts),
            mode=entry.mode,
        )
        for entry in facts.task.files
    ]
    hidden = task_setup.credential_files(facts.task, secrets)
    return files + [
        PlacedFile(path=os.path.join(facts.place.work, path), content=content, mode=0o600)
        for path, content in hidden.items()
    ]


def _write_inside(file: PlacedFile, work: str) -> None:
    """Write a file in the working directory; replace links that an earlier attempt put there."""
    folder = os.path.dirname(file.path)
    try:
        os.makedirs(folder, exist_ok=True)
        if os.path.commonpath(
            [os.path.realpath(folder), os.path.realpath(work)]
        ) != os.path.realpath(work):
            raise MusterError(
                "the file would lie outside of the working directory", where=file.path
            )
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(file.path, flags, 0o600), "wb") as target:
            target.write(file.content)
            os.fchmod(target.fileno(), file.mode)
    except OSError as error:
        raise MusterError(
            "a file of the task can't be written", where=file.path, why=error.strerror
        ) from error


def _private_view(
    files: Sequence[PlacedFile], facts: TaskFacts, options: TaskOptions, notice: Say
) -> CommandView:
    folder = f"{facts.place.view}-{facts.attempt}"
    os.makedirs(folder, mode=0o700, exist_ok=True)
    network = options.network
    keep = [sys.prefix, sys.base_prefix, options.plan.cwd, _source(), *options.keep]
    resolver = network.resolver if network is not None else None
    if resolver is not None and all(file.path != _RESOLVER for file in files):
        files = [*files, PlacedFile(path=_RESOLVER, content=resolver)]
    plan = plan_view(
        files,
        folder,
        working_dir=facts.place.work,
        hosts=network.hosts if network is not None else None,
        shared=[options.run_dir.path],
        keep=[*keep, os.path.dirname(options.socket_path)],
    )
    for note in plan.notes:
        notice(f"{facts.task.name}: {note}")
    return _PrivateView(plan, options)


def _source() -> str:
    return os.path.dirname(proc.PACKAGE_FOLDER)


class _PrivateView(CommandView):
    def __init__(self, plan: ViewPlan, options: TaskOptions) -> None:
        self._report, end = os.pipe2(os.O_CLOEXEC)
        self._report_end: int | None = end
        os.set_blocking(self._report, False)
        network = options.network
        self._plan = plan
        self._spec = write_view(
            plan,
            join=network.join if network is not None else None,
            environment=network.environment if network is not None else None,
            report_fd=end,
        )

    def start(
        self, words: Sequence[str], variables: Mapping[str, str], stdout: int, stderr: int
    ) -> proc.Child:
        end = self._report_end
        if end is None:
            raise ValueError("a view is started in once")
        try:
            return proc.start(
                view_argv(self._spec, words),
                env=variables,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[end],
            )
        finally:
            os.close(end)
            self._report_end = None

    def host_path(self, path: str) -> str:
        return self._plan.host_path(path)

    def take_over(self, earlier: CommandView) -> None:
        """Move the task's own entries from the mirrors of the earlier view into ours."""
        if not isinstance(earlier, _PrivateView):
            return
        ours = {mirror.at: mirror for mirror in self._plan.mirrors}
        for mirror in earlier._plan.mirrors:  # an instance of our own class
            if mirror.at in ours and os.path.isdir(mirror.folder):
                machine = {*mirror.dirs, *mirror.files, *mirror.links}
                _move_entries(mirror.folder, ours[mirror.at].folder, machine)

    def why_not_begun(self) -> str | None:
        try:
            said = os.read(self._report, 4096)
        except OSError:
            return None
        if not said:
            return None
        try:
            plain = json.loads(said)
        except ValueError:
            return said.decode(errors="replace")
        if not isinstance(plain, dict) or plain.get("code") in _NO_COMMAND:
            return None  # the log has it, and the exit code is a shell's
        return str(plain.get("what", plain))

    def close(self) -> None:
        if self._report >= 0:
            os.close(self._report)
            self._report = -1
        _remove_secrets(path for path, file in self._plan.files.items() if _is_secret(file))
        clear_view(self._plan.folder)


def _is_secret(file: PlacedFile) -> bool:
    return file.mode & 0o077 == 0


def _remove_secrets(paths: Iterable[str]) -> None:
    """Remove the secrets from the run directory; the next start writes them again."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _move_entries(source: str, target: str, machine: set[str]) -> None:
    for name in os.listdir(source):
        if name in machine:
            continue
        old, new = os.path.join(source, name), os.path.join(target, name)
        if not os.path.lexists(new):
            os.rename(old, new)
        elif os.path.isdir(new) and os.path.isdir(old) and not os.path.islink(old):
            _move_entries(old, new, set())


class _RealView(CommandView):
    def __init__(self, files: Sequence[PlacedFile], facts: TaskFacts, options: TaskOptions) -> None:
        claims = os.path.join(options.run_dir.path, "claims")
        os.makedirs(claims, mode=0o700, exist_ok=True)
        self._place = RealPathFiles(facts.task.name, claims) if files else None
        self._work = facts.place.work
        if self._place is not None:
            self._place.place(files)

    def start(
        self, words: Sequence[str], variables: Mapping[str, str], stdout: int, stderr: int
    ) -> proc.Child:
        return proc.start(words, env=variables, cwd=self._work, stdout=stdout, stderr=stderr)

    def close(self) -> None:
        if self._place is not None:
            self._place.remove()
