"""What the agent of a task and its command are given: orders, options, resolved tokens, files, variables, secrets."""

import base64
import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchmuster.core.files.layout import RunDir, WorkingFolder, muster_home
from torchmuster.core.model import contract
from torchmuster.core.model.text import did_you_mean
from torchmuster.errors import MusterError
from torchmuster.launcher.net import remote_messages as messages
from torchmuster.workflow.plan import GroupPlan, NetworkShare, TaskFile, TaskPlan, WorkflowPlan
from torchmuster.workflow.tokens import Token, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """The command line of a group's head.

    Attributes:
        listen_fd: The listening socket.
        lifeline_fd: A pipe that closes when the owner of the workflow has gone.
    """

    run_dir: str
    group: str
    listen_fd: int
    lifeline_fd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrder:
    """The command line of a task's agent.

    Attributes:
        head: The possible addresses of the group's head, each `host:port`.
        lifeline_fd: A pipe that closes when the process that started the agent has gone.
        environment: A file of variables to apply; None to keep the inherited ones.
        address: The address of this host for others, if the call to the head does not show it.
    """

    run_dir: str
    group: str
    task: str
    attempt: int
    head: tuple[str, ...]
    lifeline_fd: int | None = None
    environment: str | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """The options of a task's agent.

    Attributes:
        attempt: The first attempt in this working directory, whose name has its number.
        heads: Addresses of the group's head, to try in turn.
        gpus: The GPUs that the command may see; None for all that the machine shows.
        network: The task's part of a private network; None to share the machine's network.
        port_candidates: The ports to check, the same for all tasks of a group.
        socket_path: The socket on which the command's processes call the agent.
        host_name: This pod's DNS name. DNS may learn those of others late, so the command waits for
            them.
        address: The address of this host for others, if the call to the head does not show it.
    """

    plan: WorkflowPlan
    group: GroupPlan
    task: TaskPlan
    attempt: int
    run_dir: RunDir
    heads: tuple[tuple[str, int], ...]
    secret: bytes
    gpus: tuple[str, ...] | None = None
    network: NetworkShare | None = None
    port_candidates: tuple[int, ...] = ()
    socket_path: str = ""
    address: str | None = None
    host_name: str | None = None


def remote_order(message: messages.StartTask, run_dir: str, head: str, address: str) -> TaskOrder:
    """Return the command line of a task's agent on an ssh host."""
    return TaskOrder(
        run_dir=run_dir,
        group=message.group,
        task=message.task,
        attempt=message.attempt,
        head=(head,),
        address=address,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """The values of runtime tokens in one attempt of one task."""

    workflow: WorkflowPlan
    group: GroupPlan
    task: TaskPlan
    attempt: int
    place: WorkingFolder
    hosts: Mapping[str, str] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)

    def value(self, token: Token) -> str | None:
        """Return the value of a token; None to leave it unresolved."""
        argument = token.argument or ""
        match token.kind:
            case "output":
                return self.place.output
            case "input":
                return self._input(argument)
            case "workflow_id":
                return self.workflow.run_id
            case "uuid":
                return self.workflow.uuid
            case "host":
                return self.hosts.get(argument)
            case "ip":
                return self.addresses.get(argument)
            case "rank":
                names = [task.name for task in self.group.tasks]
                return str(names.index(self.task.name))
            case "num_tasks":
                return str(len(self.group.tasks))
            case "attempt":
                return str(self.attempt)
            case "port":
                port = self.ports.get(argument)
                return None if port is None else str(port)
        return None

    def _input(self, argument: str) -> str | None:
        if argument.isdecimal():
            return self.place.input(int(argument))
        sources = [entry.source for entry in self.task.inputs]
        return self.place.input(sources.index(argument)) if argument in sources else None

    def resolve(self, text: str) -> str:
        """Return the text with its tokens resolved."""
        return resolve(text, self.value) if "{{" in text else text


def file_content(entry: TaskFile, facts: TaskFacts) -> bytes:
    """Return the content of a file, with its tokens resolved."""
    if entry.is_base64:
        return base64.b64decode(entry.content)
    return (facts.resolve(entry.content) if entry.tokens else entry.content).encode()


def file_path(entry: TaskFile, facts: TaskFacts) -> str:
    """Return where a file appears; a relative path is relative to the working directory."""
    return os.path.join(facts.place.work, facts.resolve(entry.path))


def environment(
    facts: TaskFacts, base: Mapping[str, str], gpus: tuple[str, ...] | None
) -> dict[str, str]:
    """Return the variables of the command: `base`, ours, its GPUs, and those of the file."""
    ours = {contract.GROUP_VARIABLE: facts.group.name, contract.TASK_VARIABLE: facts.task.name}
    if gpus is not None:
        ours["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    of_file = {name: facts.resolve(value) for name, value in facts.task.environment.items()}
    return {**base, **ours, **of_file}


def credentials_path() -> str:
    """Return the path of the user's credentials file."""
    own = os.environ.get(contract.CREDENTIALS_VARIABLE)
    return own or os.path.join(muster_home(), "credentials.toml")


def read_credentials(task: TaskPlan) -> dict[str, dict[str, str]]:
    """Read the secrets that a task names: credential -> key -> value.

    Raises:
        MusterError: The file is missing, invalid, readable by others, or lacks a credential.
    """
    if not task.credentials:
        return {}
    path = credentials_path()
    example = (
        f"printf '[{task.credentials[0].name}]\\nkey = \"...\"\\n' >> {path}; chmod 600 {path}"
    )
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            known = tomllib.load(file)
    except OSError as error:
        what = f"the task `{task.name}` needs the credential `{task.credentials[0].name}`"
        raise MusterError(what, where=path, why=error.strerror, fix=example) from error
    except tomllib.TOMLDecodeError as error:
        raise MusterError("the credentials are not TOML", where=path, why=str(error)) from error
    if mode & 0o077:
        what = "the credentials can be read by others"
        raise MusterError(what, where=path, why=f"mode {mode:04o}", fix=f"chmod 600 {path}")
    return {entry.name: _credential(entry.name, known, path) for entry in task.credentials}


def _credential(name: str, known: Mapping[str, object], path: str) -> dict[str, str]:

    found = known.get(name)
    if not isinstance(found, dict):
        fix = did_you_mean(name, known, f"add a section [{name}]")
        raise MusterError(f"there is no credential `{name}`", where=path, fix=fix)
    return {str(key): str(value) for key, value in found.items()}


def credential_variables(
    task: TaskPlan, secrets: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Return the variables that hold secrets.

    Raises:
        MusterError: A credential lacks a key.
    """
    variables: dict[str, str] = {}
    for entry in task.credentials:
        for variable, key in entry.variables.items():
            if key not in secrets[entry.name]:
                keys = ", ".join(secrets[entry.name]) or "none"
                what = f"the credential `{entry.name}` has no key `{key}`"
                raise MusterError(what, where=credentials_path(), fix=f"its keys: {keys}")
            variables[variable] = secrets[entry.name][key]
    return variables


def credential_files(task: TaskPlan, secrets: Mapping[str, Mapping[str, str]]) -> dict[str, bytes]:
    """Return the files that hold secrets, to write with mode 0600: path -> content."""
    return {
        os.path.join(entry.folder, key): value.encode()
        for entry in task.credentials
        if entry.folder is not None
        for key, value in secrets[entry.name].items()
    }
