"""What will be started: the content of `plan.json`, which agents read."""

import enum
import os
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from torchmuster.core.model import contract

# What an interpreter has, found out without importing it: so its torch is reported a second earlier; and what an environment needs.


_VERSION = re.compile(r"^__version__ = '([^']+)'", re.MULTILINE)
_CUDA = re.compile(r"^cuda(?:: [^=]+)? = '([^']+)'", re.MULTILINE)
_HIP = re.compile(r"^hip(?:: [^=]+)? = '([^']+)'", re.MULTILINE)
_NCCL = re.compile(r"nvidia_nccl_cu\d+-([0-9.]+)\.dist-info$")
_MAX_BYTES = 1 << 16


def look_for_torch() -> dict[str, Any]:
    """Return the versions of Python, torch, its CUDA and NCCL as plain values.

    Takes about a millisecond: torch's own `version.py` is read as text.
    """
    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "machine": os.uname().machine,
        "torch": None,
        "is_known": True,
    }
    folder = _folder_of("torch")
    if folder is None:
        return found
    text = _read(os.path.join(folder, "version.py"))
    found["torch"] = _first(_VERSION, text)
    found["cuda"], found["hip"] = _first(_CUDA, text), _first(_HIP, text)
    found["is_known"] = found["torch"] is not None  # an editable build may have none
    found["nccl"] = _nccl(os.path.dirname(folder)) if found["cuda"] else None
    return found


def _folder_of(name: str) -> str | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            spec = find(name, None) if find is not None else None
        except Exception:  # noqa: BLE001 - a finder of another package may raise anything
            continue
        if spec is not None:
            return os.path.dirname(spec.origin) if spec.origin else None
    return None


def _nccl(packages: str) -> str | None:
    try:
        names = os.listdir(packages)
    except OSError:
        return None
    found = [match.group(1) for name in names if (match := _NCCL.match(name))]
    return found[0] if found else None


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match.group(1) if match else None


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read(_MAX_BYTES)
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentNeeds:
    """What a node must be for an environment.

    Attributes:
        sha: Of the list of its pieces: the name of the environment.
        machine: As of `uname -m`.
        glibc: The minor number of glibc 2 that its files need; 0 for none.
        python: Of the interpreter, `3.11`.
        base: The interpreter that has to be there; empty where it travels.
        size_bytes: Of the archive, which has `num_pieces`.
        unpacked_bytes: Of all its files, of which there are `num_files`.
        has_torch: It can be tried by importing torch.
    """

    sha: str
    machine: str
    glibc: int
    python: str
    base: str
    size_bytes: int
    num_pieces: int
    unpacked_bytes: int
    num_files: int
    has_torch: bool


# The target of a session: its door, wherever torchmuster is on the node.
DOOR_PROGRAM = "muster:door"

# What holds where nobody says otherwise.
MAX_RESTARTS = 3
GRACE_S = 30.0  # from the signal to stop to SIGKILL
WARN_S = 120.0  # from SIGUSR1 to the end of the job


class ScriptKind(enum.Enum):
    """How the program is given: script, module, command or function."""

    FILE = "file"
    MODULE = "module"
    COMMAND = "command"  # torchrun --no-python: executed as it is
    FUNCTION = "function"  # `torchmuster.launch`: called with what a call file holds


class StartMethod(enum.Enum):
    """How workers are started; `AUTO` forks if that is safe and reports if it isn't."""

    AUTO = "auto"
    FORK = "fork"
    FRESH = "fresh"


class RestartPolicy(enum.Enum):
    """Which failures are retried while restarts are left."""

    EVIDENCE = "evidence"  # unless what was seen says that it would end like the last
    COUNT = "count"  # always, as torchrun


class Tee(enum.Enum):
    """The ranks that the terminal shows."""

    RANK_0 = "0"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """The call file of a function: `launcher/model/carried.py` says what is in it.

    Attributes:
        source: Its path where the run is made; copied into the run directory.
        sha256: Of its bytes, in hexadecimal digits: nothing else is unpickled.
        module_file: Of the module that has the function; None of a function that travels by value.
    """

    source: str
    sha256: str
    module_file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The user's program and the interpreter that runs it.

    Attributes:
        python: Interpreter and its flags, e.g. `("/usr/bin/python3", "-u")`.
        target: Script path, module name, command, or `module:function`.
        preload: Modules that the spawner imports beside torch.
        macros: Replace `${local_rank}` in the arguments, as torchrun does.
        has_torch: Import torch before workers are forked; a script without it starts faster from a small process.
        call: Of a function, what it is called with.
    """

    kind: ScriptKind
    target: str
    args: tuple[str, ...]
    python: tuple[str, ...]
    cwd: str
    start: StartMethod = StartMethod.AUTO
    preload: tuple[str, ...] = ()
    macros: bool = False
    has_torch: bool = True
    call: FunctionCall | None = None

    def display(self) -> tuple[str, ...]:
        """Return the words at the end of the spawner's command line."""
        flag = ("-m",) if self.kind is ScriptKind.MODULE else ()
        return (*flag, self.target, *self.args)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All limits of the run, in seconds or counts.

    Attributes:
        hang_s: How long a rank may stand still while others wait for it, at least; 0: nobody watches.
        hang_most_s: The same at most, and for what may take long: saving, evaluating, compiling.
        hang_blind_s: The same for scripts that do not say how far they are.
    """

    max_restarts: int = MAX_RESTARTS
    grace_s: float = GRACE_S
    join_timeout_s: float = 600.0
    last_call_s: float = 2.0
    hang_s: float = 60.0
    hang_most_s: float = 1800.0
    hang_blind_s: float = 300.0


# Sources of these names are unpacked on the node.
ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".zip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Data that is copied to every node before its workers start.

    Attributes:
        source: A path that the node can read, absolute.
        target: Where it goes, relative to the node's scratch folder.
    """

    source: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOrder:
    """The command line of `stage`: the scratch folder of a node, and what is put there."""

    scratch: str
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedEnvironment:
    """An environment that nodes unpack into their scratch and run the program in.

    Attributes:
        archive: Its parcel, where every node can read it.
        needs: What a node must be for it.
    """

    archive: str
    needs: EnvironmentNeeds


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackOrder:
    """The command line of `unpack`: where it goes, and whether its interpreter is tried."""

    parent: str
    tries: bool
    shipped: ShippedEnvironment


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSetup:
    """The set-up of every node, done once before its workers start.

    Attributes:
        environment: Variables, before all else.
        lines: Shell lines, in one shell: `module load cuda/12.6`. What they export is for the workers.
        stages: What goes into the scratch folder.
        before: Commands in the job's environment, after staging.
        scratch: A folder of the node in which the run makes its own; the node's shell expands variables in
            it. None takes the scheduler's, else the node's temporary folder.
        python_follows: Whether an interpreter that the lines put on PATH is the job's.
        origin: Where the lines stand, for messages: `muster.toml [engines.gpu] setup`.
        shipped: The environment of the job, unpacked behind the lines.
    """

    environment: tuple[tuple[str, str], ...] = ()
    lines: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = ()
    before: tuple[str, ...] = ()
    scratch: str | None = None
    python_follows: bool = False
    origin: str = "setup"
    shipped: ShippedEnvironment | None = None

    @property
    def is_plain(self) -> bool:
        """Say whether no process has to be started for it."""
        has_signs = any(sign in (self.scratch or "") for sign in "$`~")
        return not (self.lines or self.stages or self.before or self.shipped or has_signs)

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to wait for."""
        given = self.environment, self.lines, self.stages, self.before, self.shipped
        return not any(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The complete plan of a run: nothing else decides what is started.

    Attributes:
        workers_per_node: Workers on each place; a place beyond the end takes the last number.
        node_names: What to call the places in messages; simulated nodes are n1, n2, ...
        rdzv_id: What workers see as TORCHELASTIC_RUN_ID; the run id when absent.
        first_cause_code: Exit with the worker's own code; torchrun exits with 1.
        virtual_local_rank: torchrun's option: LOCAL_RANK 0 everywhere, one GPU visible to each.
        node_setup: What every node does before its workers start.
        preflight: How the nodes are looked at before the start: `off`, `short`, or for `muster doctor` `long`;
            `only` is long and starts no worker.
        preflight_script: A script to look at instead of the program.
        engine: Where it was sent, as `--on` names it; `job.json` says more of one that muster submitted.
        job_id: The scheduler's job inside which it was started.
        restart_policy: What a failure must look like to be followed by another attempt.
        metrics_port: Of the head's loopback, where it tells Prometheus how the run stands; None: nowhere.
        nodes_return: A node that is asked to end is replaced by the system that asks, as pods are: only it ends, and the run
            waits for its replacement.
        session: The session whose doors fork its agents; None: they are started.
        spares: Nodes beyond `max_nodes` that join and load torch, but get no ranks until one of the others is lost.
        every_line: The streams (1, 2) that the run's owner shows in a file or a pipe: nothing is left out there.
        head_parts: What other packages add to its head (`core/plugs.py`).
    """

    run_id: str
    program: Program
    min_nodes: int
    max_nodes: int
    workers_per_node: tuple[int, ...]
    limits: Limits = field(default_factory=Limits)
    node_names: tuple[str, ...] = ()
    grow: bool = False
    tee: Tee = Tee.RANK_0
    stdin_rank: int | None = 0
    role: str = "default"
    rdzv_id: str | None = None
    first_cause_code: bool = True
    restart_hint: bool = False
    virtual_local_rank: bool = False
    node_setup: NodeSetup = field(default_factory=NodeSetup)
    preflight: str = "short"
    preflight_script: str | None = None
    engine: str = "local"
    job_id: str | None = None
    restart_policy: RestartPolicy = RestartPolicy.EVIDENCE
    metrics_port: int | None = None
    nodes_return: bool = False
    session: str | None = None
    spares: int = 0
    every_line: tuple[int, ...] = ()
    head_parts: tuple[str, ...] = ()

    @property
    def num_places(self) -> int:
        """Return on how many nodes an agent is started: those with ranks, then the spare ones."""
        return self.max_nodes + self.spares

    @property
    def is_of_many_commands(self) -> bool:
        """Return whether `muster torchrun` was typed on several machines: only the same lines start the run again."""
        return self.rdzv_id is not None and self.max_nodes > 1

    @property
    def again(self) -> str:
        """What starts the run again, for hints."""
        if self.is_of_many_commands:
            return "the same command on each machine"
        return f"muster restart {self.run_id}"

    def num_workers(self, place: int) -> int:
        """Return the number of workers on `place`."""
        return self.workers_per_node[min(place, len(self.workers_per_node) - 1)]

    def node_name(self, place: int) -> str:
        """Return what messages call `place`."""
        return self.node_names[place] if place < len(self.node_names) else f"node {place}"

    @property
    def debugger(self) -> str | None:
        """Return the debugger that the user brings to a rank: `debugpy` or `pdb`."""
        word = dict(self.node_setup.environment).get(contract.DEBUGGER_VARIABLE)
        return word.partition(" ")[0] if word is not None else None

    @property
    def verify_every(self) -> int | None:
        """Return after how many steps one is made again on another rank, as the command asks for it."""
        text = dict(self.node_setup.environment).get(contract.VERIFY_VARIABLE)
        return int(text) if text is not None and text.isdecimal() else None

    @property
    def is_session(self) -> bool:
        """Return whether it holds nodes for runs, and is no run itself."""
        return self.program.target == DOOR_PROGRAM

    @property
    def mixes_output(self) -> bool:
        """Return whether lines of several ranks mix, so that each needs its name from the first one on."""
        return self.tee is Tee.ALL and (self.max_nodes > 1 or self.num_workers(0) > 1)

    @property
    def is_replay(self) -> bool:
        """Return whether it makes a step of another run again: it saves nothing, and is not continued."""
        return contract.REPLAY_VARIABLE in dict(self.node_setup.environment)

    @property
    def longer_wait(self) -> str:
        """Return the option that makes the run wait longer for its nodes, as spelled by the command that made it."""
        doubled = round(2 * self.limits.join_timeout_s)
        torchrun = self.engine == "torchrun"
        return (
            f"`--rdzv-conf join_timeout={doubled}`" if torchrun else f"`--join-timeout {doubled}s`"
        )

    @property
    def is_elastic(self) -> bool:
        """Return whether the number of nodes may change."""
        return self.min_nodes < self.max_nodes
