"""Run a task's command in a container: `image:` under --container podman, docker or apptainer.

The program `container SPEC.json` removes what an earlier start left, then becomes the engine's
client.

The container sees the run directory and the folder of the task's socket at their own paths, the
files of the task read-only at theirs, and `volumeMounts`. Its variables are those of the file,
never the machine's. Single-line values go through a file (0600). Others go by name through the
engine's own environment. So no value is in a command line, and none changes the engine itself.

`muster barrier` inside needs torchmuster in the image. The agent accepts a caller of our own user
that descends from the container's first process. This works with podman, with apptainer, and with
docker if it maps no users (userns-remap) and runs on this machine, not in a virtual one.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchmuster.core import proc
from torchmuster.core.files.atomic import read_json, write_json
from torchmuster.core.model import codec
from torchmuster.errors import MusterError, UsageError
from torchmuster.workflow.plan import TaskNetwork, TaskPlan, WorkflowPlan
from torchmuster.workflow.record import State

ENGINES = ("podman", "docker", "apptainer")
CODE_IMAGE_PULL = 301
CODE_START = 3003
_REMOVE_TIMEOUT_S = 6.0
_ENGINE_FAILED = {"podman": 125, "docker": 125, "apptainer": 255}
# Values that the env-file parsers of both engines keep unchanged; versions differ on quotes, `#`
# and outer spaces.
_PLAIN = re.compile(r"(?:[^\s\"'`#\\](?:[^\r\n\"'`#\\]*[^\s\"'`#\\])?)?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_ENGINE_PREFIXES = ("DOCKER_", "CONTAINER", "PODMAN_", "XDG_", "LD_", "GO")
_PULL_WORDS = re.compile(
    r"pull|manifest|registry|repository|initializing source|unauthorized|no such image|short-name"
    r"|docker://|oci://|library://|conveyor|could not open image|no such host",
    re.IGNORECASE,
)
_DAEMON_WORDS = re.compile(
    r"daemon running|connect to the docker daemon|docker api at|cannot connect to podman",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A path of the machine, `source`, that the container sees at `target`."""

    source: str
    target: str
    read_only: bool = False

    def text(self) -> str:
        """Return the mount as an argument of --volume or --bind."""
        return f"{self.source}:{self.target}" + (":ro" if self.read_only else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """One start of a container.

    Attributes:
        words: The command, which replaces the image's own.
        names: Variables that the engine copies from its own environment.
        network: The path of a network namespace; None for the machine's network.
        gpus: GPU ids as in CUDA_VISIBLE_DEVICES.
        env_file: The file of the other variables; None without any.
        id_file: The file in which podman and docker write the container's id once they have made
            it.
    """

    kind: str
    program: str
    image: str
    words: Sequence[str]
    name: str
    working_dir: str
    uid: int
    gid: int
    mounts: Sequence[Mount] = ()
    volume_mounts: Sequence[str] = ()
    names: Sequence[str] = ()
    network: str | None = None
    gpus: Sequence[str] = ()
    privileged: bool = False
    env_file: str | None = None
    id_file: str | None = None
    labels: Mapping[str, str] | None = None


def container_argv(spec: ContainerSpec) -> list[str]:
    """Return the engine's command line; it contains no value of a variable."""
    binds = [mount.text() for mount in spec.mounts] + [_volume(text) for text in spec.volume_mounts]
    if spec.kind == "apptainer":
        return _apptainer_argv(spec, binds)
    argv = [spec.program, "run", "--rm", "--init", f"--name={spec.name}", "--ipc=host"]
    argv += [f"--user={spec.uid}:{spec.gid}", "--security-opt=label=disable"]
    if spec.kind == "podman" and spec.uid != 0:
        argv.append("--userns=keep-id")
    argv.append(f"--network={'host' if spec.network is None else f'ns:{spec.network}'}")
    if spec.gpus and spec.kind == "podman":
        argv += [f"--device=nvidia.com/gpu={gpu}" for gpu in spec.gpus]
    elif spec.gpus:  # without quotes, docker splits it at commas
        argv.append(f'--gpus="device={",".join(spec.gpus)}"')
    argv += ["--privileged"] if spec.privileged else []
    argv += [f"--cidfile={spec.id_file}"] if spec.id_file else []
    argv += [f"--env-file={spec.env_file}"] if spec.env_file else []
    argv += [f"--env={name}" for name in spec.names]
    argv += [f"--label={key}={value}" for key, value in (spec.labels or {}).items()]
    argv += [f"--volume={bind}" for bind in binds]
    argv += [f"--workdir={spec.working_dir}", f"--entrypoint={spec.words[0]}"]
    return [*argv, spec.image, *spec.words[1:]]


def _apptainer_argv(spec: ContainerSpec, binds: Sequence[str]) -> list[str]:
    image = spec.image
    if "://" not in image and not image.endswith(".sif") and not image.startswith(("/", "./")):
        image = f"docker://{image}"
    argv = [spec.program, "exec", "--cleanenv", "--no-home", "--writable-tmpfs"]
    argv += ["--nv"] if spec.gpus else []
    argv += ["--keep-privs"] if spec.privileged and spec.uid == 0 else []
    for bind in binds:
        argv += ["--bind", bind]
    return [*argv, "--pwd", spec.working_dir, image, *spec.words]


def _volume(text: str) -> str:
    source, _, target = text.partition(":")
    return f"{source}:{target or source}"


def container_name(run_id: str, task: str, attempt: int) -> str:
    """Return the name of the container of one attempt."""
    return re.sub(r"[^a-zA-Z0-9_.-]", "-", f"torchmuster-{run_id}-{task}-{attempt}")


def removal_argv(kind: str, program: str, names: Sequence[str]) -> list[str]:
    """Return the command line that ends and removes containers at once; empty for apptainer."""
    if kind == "apptainer" or not names:
        return []
    at_once = ["--ignore", "--time=0"] if kind == "podman" else []
    return [program, "rm", "--force", *at_once, *names]


def split_environment(
    kind: str, variables: Mapping[str, str], base: Mapping[str, str]
) -> tuple[dict[str, str], str, list[str]]:
    """Return the engine's environment, the env file's text, and the names to copy from the former.

    Raises:
        MusterError: A name is invalid, or a value fits neither way: it would change the engine.
    """
    if kind == "apptainer":  # the prefix keeps them apart from the engine's own variables
        own = {f"APPTAINERENV_{name}": value for name, value in variables.items()}
        return {**base, **own}, "", []
    wrong = [name for name in variables if not _NAME.fullmatch(name)]
    if wrong:
        what = f"{_shown(wrong)!r} can't be the name of a variable in a container"
        raise MusterError(what, fix="letters, digits, `_`, `.` and `-`, a letter or `_` first")
    plain = {name: value for name, value in variables.items() if _PLAIN.fullmatch(value)}
    others = {name: value for name, value in variables.items() if name not in plain}
    for name, value in others.items():
        if base.get(name, value) != value or name.startswith(_ENGINE_PREFIXES):
            raise MusterError(
                f"the variable `{name}` can't be given to a container",
                why=f"its value has a newline, quote, `#` or outer space, and {kind} itself reads `{name}`",
                fix="set it in the command: sh -c 'export ...; ...'",
            )
    text = "".join(f"{name}={value}\n" for name, value in plain.items())
    return {**base, **others}, text, sorted(others)


def find_engine(kind: str, which: Callable[[str], str | None] = shutil.which) -> str:
    """Return the path of a container engine.

    Raises:
        UsageError: The engine is not installed; the message says which engines are.
    """
    found = which(kind)
    if found is not None:
        return found
    here = [name for name in ENGINES if which(name) is not None]
    raise UsageError(
        f"there is no `{kind}` on this machine",
        where="--container",
        why=f"of {', '.join(ENGINES)}, installed here: {', '.join(here) or 'none'}",
        fix=f"--container {here[0]}" if here else "install one, or leave --container out",
    )


def container_problems(
    plan: WorkflowPlan, which: Callable[[str], str | None] = shutil.which
) -> list[UsageError]:
    """Return all reasons why the tasks of a workflow can't run in containers."""
    if plan.container == "none":
        return []
    problems = []
    try:
        find_engine(plan.container, which)
    except UsageError as error:
        problems.append(error)
    tasks = [task for group in plan.groups for task in group.tasks]
    bare = [task.name for task in tasks if not task.image]
    if bare:
        what = f"no `image:` for --container {plan.container}: {_shown(bare)}"
        problems.append(UsageError(what, where="tasks", fix="give each of these tasks an `image:`"))
    training = [task.name for task in tasks if task.training is not None]
    if training:
        what = f"training tasks (`script:`) don't run in containers: {_shown(training)}"
        fix = "write the launch as `command:`, or leave --container out"
        problems.append(UsageError(what, where="tasks", fix=fix))
    if plan.network is TaskNetwork.PRIVATE:
        problems += _network_problems(plan.container)
    return problems


def _network_problems(kind: str) -> list[UsageError]:
    if kind == "docker":
        why = "docker's daemon joins no network namespace but that of another container"
    elif kind == "podman" and os.geteuid() != 0:
        why = "podman without root has a user namespace of its own, which may not join another's network"
    else:
        return []
    what = f"--container {kind} can't have --task-network private here"
    return [UsageError(what, where="--task-network", why=why, fix="--task-network shared")]


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


class CommandFailedError(MusterError):
    """The command of a task never started; `state` and `code` are those of the task then."""

    state = State.FAILED_START_ERROR
    code = CODE_START


def read_failure(
    spec: ContainerSpec, status: int, tail: Sequence[str], *, was_made: bool
) -> CommandFailedError | None:
    """Return why the container never started; None when the status is the command's own."""
    if status != _ENGINE_FAILED[spec.kind] or was_made:
        return None
    words = [line.strip() for line in tail if line.strip()]
    if spec.kind == "apptainer" and not any(line.startswith("FATAL:") for line in words):
        return None
    why = "\n".join(words[-8:]) or f"{spec.kind} ended with {status} and said nothing"
    if not _DAEMON_WORDS.search(why) and _PULL_WORDS.search(why):
        failure = CommandFailedError(f"the image `{spec.image}` can't be fetched", why=why)
        failure.state, failure.code = State.FAILED_IMAGE_PULL, CODE_IMAGE_PULL
        return failure
    return CommandFailedError(f"{spec.kind} can't start the container", why=why)


def gpu_variables(kind: str, task: TaskPlan, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables, without our CUDA_VISIBLE_DEVICES if the engine renumbers devices."""
    kept = dict(variables)
    if kind != "apptainer" and "CUDA_VISIBLE_DEVICES" not in task.environment:
        kept.pop("CUDA_VISIBLE_DEVICES", None)
    return kept


class Container:
    """One container from its start to its removal."""

    def __init__(self, spec: ContainerSpec, folder: str) -> None:
        self.spec = spec
        self._folder = folder
        self._pid = 0

    def write(self, earlier: Sequence[str], env_text: str) -> list[str]:
        """Write the start's files (mode 0600); return the command line that starts the container.

        Args:
            earlier: The names of containers that a killed agent may have left.
            env_text: The text of the env file.
        """
        if self.spec.env_file:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(self.spec.env_file, flags, 0o600), "w") as file:
                file.write(env_text)
        order = ContainerCommands(
            remove=tuple(removal_argv(self.spec.kind, self.spec.program, earlier)),
            run=tuple(container_argv(self.spec)),
        )
        path = os.path.join(self._folder, "container.json")
        write_json(path, codec.to_plain(order), mode=0o600)
        return proc.node_program("container", path)

    def pid(self) -> int:
        """Return the machine's pid of the container's first process; 0 while there is none."""
        if self._pid == 0 and self.spec.kind != "apptainer" and self.was_made():
            argv = [self.spec.program, "inspect", "--format={{.State.Pid}}", self.spec.name]
            with contextlib.suppress(MusterError, ValueError):
                self._pid = int(proc.ask(argv, b"", _REMOVE_TIMEOUT_S).stdout)
        return self._pid

    def was_made(self) -> bool:
        """Return whether the engine has made the container."""
        return self.spec.id_file is not None and os.path.exists(self.spec.id_file)

    def remove(self) -> None:
        """End and remove the container, whatever its state."""
        argv = removal_argv(self.spec.kind, self.spec.program, [self.spec.name])
        if argv:
            with contextlib.suppress(MusterError):
                proc.ask(argv, b"", _REMOVE_TIMEOUT_S)


def remove_containers(kind: str, run_id: str, group: str) -> None:
    """Remove the containers that killed agents of a group have left."""
    program = shutil.which(kind)
    if kind not in ("podman", "docker") or program is None:
        return
    argv = [program, "ps", "--all", "--quiet", f"--filter=label=torchmuster.run={run_id}"]
    argv += [f"--filter=label=torchmuster.group={group}"]
    with contextlib.suppress(MusterError):
        found = proc.ask(argv, b"", _REMOVE_TIMEOUT_S).stdout.decode(errors="replace").split()
        if found:
            proc.ask(removal_argv(kind, program, found), b"", _REMOVE_TIMEOUT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerCommands:
    """The input file of `container`: the removal command (empty for none), and the client's."""

    remove: tuple[str, ...]
    run: tuple[str, ...]


def main(arguments: list[str]) -> int:
    """Remove what an earlier start left, then become the engine's client."""
    order = codec.from_plain(ContainerCommands, read_json(arguments[0]))
    if order.remove:  # its failure for a missing container does not matter
        proc.ask(order.remove, b"", 30.0)
    os.execve(order.run[0], order.run, dict(os.environ))
    return 1
