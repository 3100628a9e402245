"""The plan of a run: the content of `plan.json`, which agents read."""

import enum
import os
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from torchmuster.core.model import contract

# Find the interpreter's packages without importing them, so that torch is reported a second
# earlier.


_VERSION = re.compile(r"^__version__ = '([^']+)'", re.MULTILINE)
_CUDA = re.compile(r"^cuda(?:: [^=]+)? = '([^']+)'", re.MULTILINE)
_HIP = re.compile(r"^hip(?:: [^=]+)? = '([^']+)'", re.MULTILINE)
_NCCL = re.compile(r"nvidia_nccl_cu\d+-([0-9.]+)\.dist-info$")
_MAX_BYTES = 1 << 16


def look_for_torch() -> dict[str, Any]:
    """Return the versions of Python, torch, CUDA and NCCL as plain values.

    It reads torch's `version.py` as text, which takes about a millisecond.
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


_STAMP = re.compile(r"\d{8}-\d{6}-(?=[A-Za-z0-9])")


def short_id(run_id: str) -> str:
    """Return a run id without its time stamp, e.g. `train-3f2a`; every command accepts it too."""
    return _STAMP.sub("", run_id, count=1) if _STAMP.match(run_id) else run_id


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentNeeds:
    """What a node must have for a shipped environment.

    Attributes:
        sha: Hash of the list of its pieces; it names the environment.
        machine: As printed by `uname -m`.
        glibc: Minor version of glibc 2 that its files need; 0 for none.
        python: Version of the interpreter, `3.11`.
        base: The interpreter that the node must have; empty if it is shipped.
        size_bytes: Size of the archive, which has `num_pieces`.
        unpacked_bytes: Size of all its `num_files` files.
        has_torch: It can be tested by importing torch.
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


# The program of a session: the server that forks agents, wherever torchmuster is on the node.
SESSION_PROGRAM = "muster:door"

# Defaults.
MAX_RESTARTS = 3
GRACE_S = 30.0  # from the signal to stop to SIGKILL
WARN_S = 120.0  # from SIGUSR1 to the end of the job


class ScriptKind(enum.Enum):
    """How the program is given: script, module, command or function."""

    FILE = "file"
    MODULE = "module"
    COMMAND = "command"  # torchrun --no-python: executed directly
    FUNCTION = "function"  # `torchmuster.launch`: called as the call file says


class StartMethod(enum.Enum):
    """How workers are started; `AUTO` forks if that is safe, and otherwise reports why not."""

    AUTO = "auto"
    FORK = "fork"
    FRESH = "fresh"


class RestartPolicy(enum.Enum):
    """Which failures are retried while restarts are left."""

    EVIDENCE = "evidence"  # unless the evidence says that it would fail in the same way
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
        source: Its path where the run is created; it is copied into the run directory.
        sha256: Hash of its bytes, hexadecimal: nothing else is unpickled.
        module_file: File of the module that defines the function; None if it travels by value.
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
        preload: Modules that the spawner imports in addition to torch.
        macros: Replace `${local_rank}` in the arguments, as torchrun does.
        has_torch: Import torch before workers are forked; without it a small process starts faster.
        call: For a function, its call file.
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
        """Return the last arguments of the spawner's command line."""
        flag = ("-m",) if self.kind is ScriptKind.MODULE else ()
        return (*flag, self.target, *self.args)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All limits of the run, in seconds or counts.

    Attributes:
        hang_s: Shortest time without progress, while others wait, after which a rank counts as
            hung; 0: off.
        hang_most_s: Longest such time, also used for slow activities: saving, evaluating,
            compiling.
        hang_blind_s: The time for scripts that do not report their progress.
    """

    max_restarts: int = MAX_RESTARTS
    grace_s: float = GRACE_S
    join_timeout_s: float = 600.0
    last_call_s: float = 2.0
    hang_s: float = 60.0
    hang_most_s: float = 1800.0
    hang_blind_s: float = 300.0


# Sources with these suffixes are unpacked on the node.
ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".zip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Data that is copied to every node before its workers start.

    Attributes:
        source: An absolute path that the node can read.
        target: Its destination, relative to the node's scratch folder.
    """

    source: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOrder:
    """The command line of `stage`: a node's scratch folder, and what to put there."""

    scratch: str
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedEnvironment:
    """An environment that nodes unpack into their scratch folder to run the program.

    Attributes:
        archive: Path of its archive, readable on every node.
        needs: What a node must have for it.
    """

    archive: str
    needs: EnvironmentNeeds


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackOrder:
    """The command line of `unpack`: the destination, and whether to test its interpreter."""

    parent: str
    tries: bool
    shipped: ShippedEnvironment


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSetup:
    """The set-up of every node, done once before its workers start.

    Attributes:
        environment: Variables, set before everything else.
        lines: Shell lines, run in one shell: `module load cuda/12.6`. Workers get what they export.
        stages: Data for the scratch folder.
        before: Commands to run in the job's environment, after staging.
        scratch: A folder on the node in which the run creates its own; the node's shell expands
            variables in it. None: the scheduler's, else the node's temporary folder.
        python_follows: Whether the job uses the interpreter that the lines put on PATH.
        origin: Where the lines come from, for messages: `muster.toml [engines.gpu] setup`.
        shipped: The environment of the job, unpacked after the lines have run.
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
        """Return whether there is nothing to do."""
        given = self.environment, self.lines, self.stages, self.before, self.shipped
        return not any(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The complete plan of a run: it alone decides what is started.

    Attributes:
        workers_per_node: Workers at each place; further places use the last number.
        node_names: Names of the places in messages; simulated nodes are n1, n2, ...
        rdzv_id: TORCHELASTIC_RUN_ID for workers; default the run id.
        first_cause_code: Exit with the worker's own code; torchrun exits with 1.
        virtual_local_rank: torchrun's option: LOCAL_RANK 0 everywhere, one GPU visible to each.
        node_setup: What every node does before its workers start.
        preflight: Form of the preflight: `off`, `short`, or for `muster doctor` `long`; `only` is
            long and starts no worker.
        preflight_script: A script to check in place of the program.
        engine: Where it was sent, as named by `--on`; `job.json` has more if muster submitted a
            job.
        job_id: The scheduler's job in which it was started.
        restart_policy: Which failures are followed by another attempt.
        metrics_port: Port on the head's loopback for Prometheus metrics of the run; None: no
            metrics.
        nodes_return: The system that stops a node replaces it, as with pods: only that node ends,
            and the run waits for its replacement.
        session: The session whose servers fork its agents; None: agents are started.
        spares: Nodes beyond `max_nodes` that join and load torch, but get no ranks until another
            node is lost.
        every_line: The streams (1, 2) that the owner writes to a file or a pipe: nothing is left
            out there.
        head_parts: Head parts from other packages (`core/plugs.py`).
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
        """Return the number of nodes with an agent: those with ranks, then the spare ones."""
        return self.max_nodes + self.spares

    @property
    def is_of_many_commands(self) -> bool:
        """Return whether `muster torchrun` was typed on several machines; a restart repeats it."""
        return self.rdzv_id is not None and self.max_nodes > 1

    @property
    def again(self) -> str:
        """How to start the run again, for hints."""
        if self.is_of_many_commands:
            return "the same command on each machine"
        return f"muster restart {short_id(self.run_id)}"

    def num_workers(self, place: int) -> int:
        """Return the number of workers on `place`."""
        return self.workers_per_node[min(place, len(self.workers_per_node) - 1)]

    def node_name(self, place: int) -> str:
        """Return the name of `place` in messages."""
        return self.node_names[place] if place < len(self.node_names) else f"node {place}"

    @property
    def debugger(self) -> str | None:
        """Return the debugger that the user attaches to a rank: `debugpy` or `pdb`."""
        word = dict(self.node_setup.environment).get(contract.DEBUGGER_VARIABLE)
        return word.partition(" ")[0] if word is not None else None

    @property
    def verify_every(self) -> int | None:
        """Return every how many steps one is repeated on another rank, if requested."""
        text = dict(self.node_setup.environment).get(contract.VERIFY_VARIABLE)
        return int(text) if text is not None and text.isdecimal() else None

    @property
    def is_session(self) -> bool:
        """Return whether this is a session, which holds nodes for runs, rather than a run."""
        return self.program.target == SESSION_PROGRAM

    @property
    def mixes_output(self) -> bool:
        """Return whether lines of several ranks mix, so that each needs a prefix from the start."""
        return self.tee is Tee.ALL and (self.max_nodes > 1 or self.num_workers(0) > 1)

    @property
    def is_replay(self) -> bool:
        """Return whether it repeats a step of another run: nothing is saved, nor continued."""
        return contract.REPLAY_VARIABLE in dict(self.node_setup.environment)

    @property
    def longer_wait(self) -> str:
        """Return the option for a longer wait for nodes, in the spelling of the command used."""
        doubled = round(2 * self.limits.join_timeout_s)
        if self.engine == "torchrun":
            return f"`--rdzv-conf join_timeout={doubled}`"
        return f"`--join-timeout {doubled}s`"

    @property
    def is_elastic(self) -> bool:
        """Return whether the number of nodes may change."""
        return self.min_nodes < self.max_nodes
