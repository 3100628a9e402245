"""What a task's command sees: a container, a private view or real paths.

With mount namespaces, every file is at its path in the task's own view and never on the machine.
Without them, files are created at their real paths and removed at the end; a collision is an error.
Every file is created exclusively, so nothing that existed is ever changed. A claim record is
written before the first file. After a `kill -9`, the next start or `clean_up` removes only what the
record names: the same inode, or the same content if the record had not got that far.
"""

import contextlib
import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchmuster.core import proc
from torchmuster.core.files.atomic import read_json, write_json
from torchmuster.errors import MusterError, UsageError
from torchmuster.workflow.plan import NetworkShare
from torchmuster.workflow.sandbox import container
from torchmuster.workflow.sandbox.container import (
    CommandFailedError,
    Container,
    ContainerSpec,
    Mount,
)
from torchmuster.workflow.sandbox.place import (
    PlacedFile,
    ViewPlan,
    clear_view,
    is_below,
    namespaces_available,
    nearest_directory,
    plan_view,
    problem_of_path,
    refuse,
    view_argv,
    write_new,
    write_view,
)
from torchmuster.workflow.task import setup as task_setup
from torchmuster.workflow.task.setup import TaskFacts, TaskOptions

Say = Callable[[str], None]

_NO_COMMAND = (126, 127)  # exit codes of a shell: not executable, not found
_MAX_EARLIER = 8
_MAX_COMPARED_BYTES = 16 << 20


class CommandView:
    """What one start of a command sees; the defaults are those of the machine itself."""

    def start(
        self, words: Sequence[str], variables: Mapping[str, str], stdout: int, stderr: int
    ) -> proc.Child:
        """Start the command in this view."""
        raise NotImplementedError

    def host_path(self, path: str) -> str:
        """Return the machine's path of a file that the task sees at `path`."""
        return path

    def take_over(self, earlier: "CommandView") -> None:
        """Keep what an earlier start wrote outside of their common working directory."""

    def why_not_begun(self, status: int, tail: Sequence[str]) -> CommandFailedError | None:
        """Return why the command itself never started; None when `status` is its own."""
        return None

    def pids(self) -> set[int]:
        """Return further processes whose descendants belong to the command."""
        return set()

    def kill(self) -> None:
        """End processes of the command that don't descend from the started process."""

    def close(self) -> None:
        """Remove what was put outside of the working directory."""


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
    claims = os.path.join(options.run_dir.path, "claims")
    os.makedirs(claims, mode=0o700, exist_ok=True)
    view = RealPathFiles(facts.task.name, claims, facts.place.work)
    if outside:
        notice(
            f"{facts.task.name}: no view of its own here ({why}): its files are created at their"
            " real paths and removed at the end"
        )
        view.place(outside)
    return view


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
        if not is_below(os.path.realpath(folder), os.path.realpath(work)):
            what = "the file would lie outside of the working directory"
            raise MusterError(what, where=file.path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.path)
        write_new(file.path, file.content, file.mode)
    except OSError as error:
        raise MusterError(
            "a file of the task can't be written", where=file.path, why=error.strerror
        ) from error


def _network_files(network: NetworkShare | None, files: Sequence[PlacedFile]) -> list[PlacedFile]:
    """Return the files by which a private network names its tasks, unless the task has its own."""
    if network is None:
        return []
    taken = {file.path for file in files}
    ours = {"/etc/hosts": network.hosts, "/etc/resolv.conf": network.resolver}
    return [
        PlacedFile(path=path, content=content)
        for path, content in ours.items()
        if content is not None and path not in taken
    ]


def _private_view(
    files: Sequence[PlacedFile], facts: TaskFacts, options: TaskOptions, notice: Say
) -> CommandView:
    folder = f"{facts.place.view}-{facts.attempt}"
    os.makedirs(folder, mode=0o700, exist_ok=True)
    network = options.network
    source = os.path.dirname(proc.PACKAGE_FOLDER)
    keep = [sys.prefix, sys.base_prefix, options.plan.cwd, source]
    plan = plan_view(
        [*files, *_network_files(network, files)],
        folder,
        working_dir=facts.place.work,
        shared=[options.run_dir.path],
        keep=[*keep, os.path.dirname(options.socket_path)],
    )
    for note in plan.notes:
        notice(f"{facts.task.name}: {note}")
    return _PrivateView(plan, options)


class ContainerView(CommandView):
    """One start in a container, which leaves nothing on the machine.

    Raises:
        MusterError: The engine is not installed, or a file can't be placed.
    """

    def __init__(self, files: Sequence[PlacedFile], facts: TaskFacts, options: TaskOptions) -> None:
        self._facts = facts
        self._options = options
        self._kind = options.plan.container
        self._program = container.find_engine(self._kind)
        self._folder = f"{facts.place.view}-{facts.attempt}"
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        self._mounts = self._write(files)
        self._container: Container | None = None

    def _write(self, files: Sequence[PlacedFile]) -> list[Mount]:
        placed = [*files, *_network_files(self._network(), files)]
        problems = ((file.path, problem_of_path(file.path)) for file in placed)
        refuse([f"`{path}` {problem}" for path, problem in problems if problem is not None])
        mounts = []
        try:
            for number, file in enumerate(placed):
                disk = os.path.join(self._folder, f"file{number}")
                write_new(disk, file.content, file.mode)
                target = os.path.normpath(file.path)
                mounts.append(Mount(source=disk, target=target, read_only=True))
        except OSError as error:
            what = "the files of the container can't be written"
            raise MusterError(what, where=error.filename, why=error.strerror) from error
        return mounts

    def _network(self) -> NetworkShare | None:
        return None if self._facts.task.host_network else self._options.network

    def start(
        self, words: Sequence[str], variables: Mapping[str, str], stdout: int, stderr: int
    ) -> proc.Child:
        """Start the engine's client; it forwards SIGTERM and returns the command's exit code."""
        engine, env_text, names = container.split_environment(
            self._kind, self._inside(variables), dict(os.environ)
        )
        self._container = Container(self._spec(words, names, env_text), self._folder)
        run, task, attempt = self._options.plan.run_id, self._facts.task.name, self._facts.attempt
        first = max(0, attempt - _MAX_EARLIER)
        earlier = [
            container.container_name(run, task, number) for number in range(first, attempt + 1)
        ]
        argv = self._container.write(earlier, env_text)
        if self._kind == "apptainer" and (network := self._network()) is not None:
            argv = self._join(network.join, argv)
        return proc.start(
            argv, env=engine, cwd=self._facts.place.work, stdout=stdout, stderr=stderr
        )

    def _inside(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the container's variables: those of the file and ours, not the machine's."""
        task, network = self._facts.task, self._network()
        asked = {*task.environment, *(name for one in task.credentials for name in one.variables)}
        inside = {
            name: value
            for name, value in variables.items()
            if name in asked or os.environ.get(name) != value
        }
        inside = container.gpu_variables(self._kind, task, inside)
        return {**network.environment, **inside} if network is not None else inside

    def _spec(self, words: Sequence[str], names: Sequence[str], env_text: str) -> ContainerSpec:
        facts, options = self._facts, self._options
        network = self._network()
        if not words:
            raise MusterError("the task has no command", where=facts.task.name)
        own = [options.run_dir.path, os.path.dirname(options.socket_path)]
        return ContainerSpec(
            kind=self._kind,
            program=self._program,
            image=facts.resolve(facts.task.image or ""),
            words=words,
            name=container.container_name(options.plan.run_id, facts.task.name, facts.attempt),
            working_dir=facts.place.work,
            uid=os.getuid(),
            gid=os.getgid(),
            mounts=[*(Mount(source=path, target=path) for path in own), *self._mounts],
            volume_mounts=[facts.resolve(text) for text in facts.task.volume_mounts],
            names=names,
            network=network.join.get("net") if network is not None else None,
            gpus=options.gpus or (),
            privileged=facts.task.privileged,
            env_file=os.path.join(self._folder, "variables") if env_text else None,
            id_file=None if self._kind == "apptainer" else os.path.join(self._folder, "id"),
            labels={
                "torchmuster.run": options.plan.run_id,
                "torchmuster.group": facts.group.name,
            },
        )

    def _join(self, join: Mapping[str, str | None], argv: Sequence[str]) -> list[str]:
        """Make the view launcher enter the task's network, because apptainer keeps its caller's."""
        path = os.path.join(self._folder, "join.json")
        write_json(path, {"join": dict(join), "working_dir": self._facts.place.work}, mode=0o600)
        return proc.node_program("view", path, "--", *argv, python=argv[0])

    def pids(self) -> set[int]:
        """Return the container's first process; its descendants may call the agent."""
        pid = self._container.pid() if self._container is not None else 0
        return {pid} if pid else set()

    def host_path(self, path: str) -> str:
        """Return the machine's path of a file under one of the `volumeMounts`."""
        for text in self._facts.task.volume_mounts:
            source, _, target = self._facts.resolve(text).partition(":")
            target = target or source
            if path == target or path.startswith(target.rstrip("/") + "/"):
                return os.path.normpath(source + "/" + os.path.relpath(path, target))
        return path

    def why_not_begun(self, status: int, tail: Sequence[str]) -> CommandFailedError | None:
        """Return why the container itself never started; None when it did."""
        if self._container is None:
            return None
        made = self._container.was_made()
        return container.read_failure(self._container.spec, status, tail, was_made=made)

    def kill(self) -> None:
        """End the container; killing the engine's client would leave it running."""
        if self._container is not None:
            self._container.remove()

    def close(self) -> None:
        """Remove the container, which a killed client of the engine may have left."""
        self.kill()
        self._container = None


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

    def why_not_begun(self, status: int, tail: Sequence[str]) -> CommandFailedError | None:
        del status, tail  # the launcher has reported it
        try:
            said = os.read(self._report, 4096)
        except OSError:
            return None
        if not said:
            return None
        try:
            plain = json.loads(said)
        except ValueError:
            plain = {"what": said.decode(errors="replace")}
        if not isinstance(plain, dict) or plain.get("code") in _NO_COMMAND:
            return None  # the log has it, and the exit code is a shell's
        why = str(plain.get("what", plain))
        return CommandFailedError("the command's environment can't be set up", why=why)

    def close(self) -> None:
        if self._report >= 0:
            os.close(self._report)
            self._report = -1
        for path, file in self._plan.files.items():
            if file.mode & 0o077 == 0:  # a secret: the next start writes it again
                with contextlib.suppress(OSError):
                    os.unlink(path)
        clear_view(self._plan.folder)


def _move_entries(source: str, target: str, machine: set[str]) -> None:
    for name in os.listdir(source):
        if name in machine:
            continue
        old, new = os.path.join(source, name), os.path.join(target, name)
        if not os.path.lexists(new):
            os.rename(old, new)
        elif os.path.isdir(new) and os.path.isdir(old) and not os.path.islink(old):
            _move_entries(old, new, set())


class RealPathFiles(CommandView):
    """The machine itself, with the files of one task at their real paths.

    Attributes:
        record: The claim record's path.
    """

    def __init__(self, task: str, claims: str, work: str = "/") -> None:
        """Take the task's name, the folder of all claims of the run, and the working directory."""
        self._task = task
        self._claims = claims
        self._work = work
        self._has_placed = False
        self.record = os.path.join(claims, hashlib.sha256(task.encode()).hexdigest()[:16] + ".json")

    def start(
        self, words: Sequence[str], variables: Mapping[str, str], stdout: int, stderr: int
    ) -> proc.Child:
        """Start the command in the working directory."""
        return proc.start(words, env=variables, cwd=self._work, stdout=stdout, stderr=stderr)

    def close(self) -> None:
        """Remove the files that were placed."""
        if self._has_placed:
            self.remove()

    def place(self, files: Sequence[PlacedFile]) -> None:
        """Create all files or none.

        Raises:
            UsageError: Paths can't be used, or exist already; the message names every one.
            MusterError: The file system refused.
        """
        self._has_placed = True
        self._remove_stale_claims()
        clean_up(self.record)  # the files of an earlier attempt: a task has one set
        refuse(self._problems(files))
        claim = self._claim(files)
        write_json(self.record, claim, mode=0o600)
        try:
            for directory in claim["directories"]:
                os.mkdir(directory["path"], 0o755)
                directory["inode"] = _identity(os.lstat(directory["path"]))
            for file, entry in zip(files, claim["files"], strict=True):
                entry["inode"] = _identity(write_new(entry["path"], file.content, file.mode))
            write_json(self.record, claim, mode=0o600)
        except OSError as error:
            _remove(claim, made_only=True)
            os.unlink(self.record)
            raise MusterError(
                "the task's files can't be created", where=error.filename, why=error.strerror
            ) from error

    def remove(self) -> list[str]:
        """Remove the files that were placed; return the paths that others have replaced."""
        return clean_up(self.record)

    def _problems(self, files: Sequence[PlacedFile]) -> list[str]:
        problems: list[str] = []
        seen: set[str] = set()
        for file in files:
            real = os.path.realpath(file.path)
            problem = problem_of_path(file.path)
            if problem is None and real in seen:
                problem = "is placed twice"
            elif problem is None and os.path.lexists(real):
                problem = f"exists already: {self._owner(real)}"
            elif problem is None and not os.path.isdir(nearest_directory(real)):
                problem = f"can't be placed: `{nearest_directory(real)}` is not a directory"
            seen.add(real)
            if problem is not None:
                problems.append(f"`{file.path}` {problem}")
        parents = {os.path.realpath(file.path) for file in files}
        problems += [
            f"`{path}` lies below `{above}`, which is a file"
            for path in sorted(parents)
            for above in sorted(parents)
            if path.startswith(above + "/")
        ]
        return problems

    def _owner(self, path: str) -> str:
        for claim in self._other_claims():
            if any(entry["path"] == path for entry in claim["files"]):
                return f"task `{claim['task']}` of this run has placed it"
        return "it was there before"

    def _other_claims(self) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError):
            names = [os.path.join(self._claims, name) for name in sorted(os.listdir(self._claims))]
            records = [read_claim(path) for path in names if path != self.record]
            return [claim for claim in records if claim is not None]
        return []

    def _remove_stale_claims(self) -> None:
        os.makedirs(self._claims, mode=0o700, exist_ok=True)
        for name in sorted(os.listdir(self._claims)):
            claim = read_claim(os.path.join(self._claims, name))
            if claim is not None and not _owner_lives(claim):
                clean_up(os.path.join(self._claims, name))

    def _claim(self, files: Sequence[PlacedFile]) -> dict[str, Any]:
        paths = [os.path.realpath(file.path) for file in files]
        missing: set[str] = set()
        for path in paths:
            parent = os.path.dirname(path)
            while not os.path.isdir(parent):
                missing.add(parent)
                parent = os.path.dirname(parent)
        facts = proc.read_process(os.getpid())
        return {
            "task": self._task,
            "boot": proc.boot_id(),
            "pid": os.getpid(),
            "start_ticks": facts.start_ticks if facts else 0,
            "directories": [
                {"path": path, "inode": None}
                for path in sorted(missing, key=lambda one: one.count("/"))
            ],
            "files": [
                {"path": path, "inode": None, "sha256": hashlib.sha256(file.content).hexdigest()}
                for path, file in zip(paths, files, strict=True)
            ],
        }


def clean_up(record: str) -> list[str]:
    """Remove a claim record and the files that it names; return the paths left alone.

    A path is left alone when it is no longer what the record's task made: it has another inode or
    owner, or is a directory that is not empty.

    Raises:
        UsageError: The file is not a claim record.
    """
    claim = read_claim(record)
    if claim is None:
        if not os.path.lexists(record):
            return []
        raise UsageError(f"`{record}` is not a claim record", fix="remove it by hand")
    left = _remove(claim)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(record)
    return left


def read_claim(record: str) -> dict[str, Any] | None:
    """Return a claim record; None if it is missing, incomplete or another user's."""
    try:
        if os.lstat(record).st_uid != os.geteuid():
            return None
        value = read_json(record)
        for entry in [*value["files"], *value["directories"]]:
            if not isinstance(entry["path"], str):
                return None
        return value if isinstance(value["task"], str) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _owner_lives(claim: dict[str, Any]) -> bool:
    facts = proc.read_process(int(claim.get("pid", 0)))
    same = facts is not None and facts.start_ticks == claim.get("start_ticks")
    return bool(same and claim.get("boot") == proc.boot_id())


def _remove(claim: dict[str, Any], *, made_only: bool = False) -> list[str]:
    left: list[str] = []
    for entry in claim["files"]:
        if made_only and entry["inode"] is None:
            continue
        if not _is_ours(entry):
            left += [entry["path"]] if os.path.lexists(entry["path"]) else []
            continue
        with contextlib.suppress(OSError):
            os.unlink(entry["path"])
    for entry in reversed(claim["directories"]):
        if made_only and entry["inode"] is None:
            continue
        try:
            if entry["inode"] in (None, _identity(os.lstat(entry["path"]))):
                os.rmdir(entry["path"])  # removes only empty ones
        except FileNotFoundError:
            continue
        except OSError:
            left.append(entry["path"])
    return left


def _is_ours(entry: dict[str, Any]) -> bool:
    try:
        facts = os.lstat(entry["path"])
        if entry["inode"] is not None:
            return bool(entry["inode"] == _identity(facts))
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            return False
        # Killed before the record got the file's inode: compare the content.
        with open(entry["path"], "rb") as file:
            content = file.read(_MAX_COMPARED_BYTES)
    except OSError:
        return False
    return bool(hashlib.sha256(content).hexdigest() == entry["sha256"])


def _identity(facts: os.stat_result) -> list[int]:
    # The kernel soon reuses the inode number of a removed file, and the birth time is not
    # portable, so owner and type count too.
    return [facts.st_dev, facts.st_ino, facts.st_uid, stat.S_IFMT(facts.st_mode)]
