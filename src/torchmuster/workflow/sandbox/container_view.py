"""The view of a task's command: the interface, and the view in a container."""

import os
from collections.abc import Mapping, Sequence

from torchmuster.core import proc
from torchmuster.core.files.atomic import write_json
from torchmuster.errors import MusterError
from torchmuster.workflow.sandbox import container
from torchmuster.workflow.sandbox.container import Container, ContainerSpec, EngineFailure, Mount
from torchmuster.workflow.sandbox.place import PlacedFile, write_new
from torchmuster.workflow.sandbox.place_plan import problem_of_path, refuse
from torchmuster.workflow.task.options import NetworkShare, TaskOptions
from torchmuster.workflow.task.setup import TaskFacts


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

    def why_not_begun(self) -> str | None:
        """Return why the command itself never started; None when it did."""
        return None

    def engine_failure(self, status: int, tail: Sequence[str]) -> EngineFailure | None:
        """Return why a container never started; None when it did, or where there is none."""
        return None

    def pids(self) -> set[int]:
        """Return further processes whose descendants belong to the command."""
        return set()

    def kill(self) -> None:
        """End processes of the command that don't descend from the started process."""

    def close(self) -> None:
        """Remove what was put outside of the working directory."""


_MAX_EARLIER = 8


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
        network = self._network()
        placed = list(files)
        taken = {file.path for file in files}
        if network is not None:
            ours = {"/etc/hosts": network.hosts, "/etc/resolv.conf": network.resolver}
            placed += [
                PlacedFile(path=path, content=content)
                for path, content in ours.items()
                if content is not None and path not in taken
            ]
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
        asked = set(task.environment) | {n for c in task.credentials for n in c.variables}
        machine = os.environ
        inside = {
            name: value
            for name, value in variables.items()
            if name in asked or machine.get(name) != value
        }
        inside = container.gpu_variables(self._kind, task, inside)
        return {**(network.environment if network is not None else {}), **inside}

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

    def engine_failure(self, status: int, tail: Sequence[str]) -> EngineFailure | None:
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
