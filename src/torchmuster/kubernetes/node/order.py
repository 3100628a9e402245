"""What a pod is told: a file of its Secrets, written by the client."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.plan import RunPlan
from torchmuster.multirun.sweep.plan import SweepPlan

ENDED_FILE = "pod-ended.json"  # in the run directory: nothing more will be written there
HELD_FILE = "pod-held.json"  # in the run directory: a client holds all of it
FINAL_CODE = 113  # the run has ended, and the Job is to end with it
AGAIN_CODE = 75  # this pod was taken away: the Job makes another one
ORDER_FILE, KEY_FILE, PLAN_FILE = "order.json", "key", "plan.json"
PACKAGE_FILE, CODE_FILE, START_FILE = "package.txz", "code.tar.gz", "start.py"
CALL_FILE = "call"  # of a function
SWEEP_FILE = "sweep.json"  # of a sweep, as its run directory calls it
PIECE = (
    ".part-"  # between a file's name and the number of a piece, where it is larger than a Secret
)
KEPT_PREFIX = "code-"  # of archives that stay on a volume for later runs
PROGRAMS_VARIABLE = "MUSTER_PROGRAMS"  # of sessions: how our programs are started in this pod
KEY_VARIABLE = "MUSTER_KEY"  # of sessions: the path of the pod's key
ORDER_VARIABLE = "MUSTER_ORDER"  # of sessions: the path of the pod's order
DISK_BYTES_VARIABLE = "MUSTER_POD_DISK_BYTES"  # its limit
READS_VARIABLE = "MUSTER_POD_READS"  # of a pod that owns nothing: it gives what is on a volume
MEMORY_BYTES_VARIABLE = "MUSTER_POD_MEMORY_BYTES"  # what it asks for
NO_ROOM_FILE = "no-room"
NUM_FILES_KEY = "num_files"  # of a member's last message, beside its result
VALUES_KEY = (
    "training"  # of it: the newest values of all metrics, as an event of the training's record
)
NODES_FILE = "nodes.json"  # of a group: which pods each task has
WORKFLOW_FILE = "workflow.json"  # of a group, as its run directory calls it
MOVED_FILE = "moved.json.xz"  # of it, as it travels: the plan with the paths of the pods
CREDENTIALS_FILE = "credentials.toml"
SUBMITTED_FILE = (
    "workflow.json.xz"  # of a group: for clients on other machines, the pods have their own
)
STAMPS_FILE = "code.stamps.json"  # beside what was unpacked: it is whole
INDEX_VARIABLE = "MUSTER_POD_INDEX"
_INDEX_VARIABLES = (INDEX_VARIABLE, "JOB_COMPLETION_INDEX")
FIRST_INDEX_VARIABLE = "MUSTER_POD_FIRST"  # of the pods of a group's second Job and later ones


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOrder:
    """One run, one sweep, or one group of a workflow, as its pods know it.

    Attributes:
        job: The name of its Job and Service; a pod's host name is JOB-INDEX.
        port: Of every pod's door; the one above it is the head's, on the first pod's loopback.
        home: $MUSTER_HOME in the pods.
        code_root: The code folder's path on the client.
        code_bytes: Of the code's archive, where it does not travel in a Secret; None where it does.
        code_sha: Of the archive.
        warn_s: How long before its time limit the workers are warned.
        start_limit_s: How long the client waits for the first pod; None for as long as any, as in a queue.
        time_limit_s: From the first start of the run on; None for no limit.
        group: Of a workflow; None for a run.
        is_sweep: Each pod is a member of a sweep.
        members: The numbers of the members, by the index of their pod; none in what one of them is told.
        index: Of the first pod in its Job: of a member of a sweep its own.
        hosts: What the pods of a group are called, with their Service: they may be of several Jobs.
        has_volume: All pods see the same `home`.
        join_s: How long a group waits for its pods, without the time in which the cluster has no room for them.
        keep_s: How long the first pod waits, after the end, for a client that takes what is in the pods alone.
        environment: Variables of everything that runs in the pods.
        continues: The run on the volume whose snapshots this one goes on with; None for none.
        saved_step: What that one has saved last, as its record tells: it has to be there.
    """

    run_id: str
    job: str
    num_pods: int
    port: int
    home: str
    code_root: str
    code_sha: str
    code_bytes: int | None = None
    warn_s: float = 0.0
    start_limit_s: float | None = None
    time_limit_s: float | None = None
    group: str | None = None
    is_sweep: bool = False
    members: tuple[int, ...] = ()
    index: int = 0
    hosts: tuple[str, ...] = ()
    has_volume: bool = False
    join_s: float = 600.0
    keep_s: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)
    continues: str | None = None
    saved_step: int | None = None

    @property
    def run_dir(self) -> RunDir:
        """Return the run directory of the first pod."""
        return RunDir(os.path.join(self.home, "runs", self.run_id))

    @property
    def folder(self) -> str:
        """Return where what is this order's alone lies in the first pod: of a run its directory."""
        return self.run_dir.path if self.group is None else self.run_dir.group(self.group).path

    @property
    def ended(self) -> str:
        """Return the note that nothing more will be written."""
        return os.path.join(self.folder, ENDED_FILE)

    @property
    def held(self) -> str:
        """Return the note that a client holds result, files, logs and record."""
        return os.path.join(self.folder, HELD_FILE)

    @property
    def archive(self) -> str:
        """Return where what did not fit into the Secret arrives."""
        return os.path.join(self.folder, CODE_FILE)

    @property
    def kept(self) -> str | None:
        """Return where an archive that a client has sent stays for later runs, by its content; None without a volume."""
        name = f"{KEPT_PREFIX}{self.code_sha}.tar.gz"
        return os.path.join(self.home, "cache", name) if self.has_volume else None

    @property
    def stamps(self) -> str:
        """Return the note that the archive has been unpacked."""
        return os.path.join(self.folder, STAMPS_FILE)

    @property
    def no_room(self) -> str:
        """Return the note of a client that the cluster has no room for pods, with its reason; it counts while it is fresh."""
        return os.path.join(self.folder, NO_ROOM_FILE)

    @property
    def head_port(self) -> int:
        """Return the port by which clients call the head."""
        return self.port + 1

    def of_member(self, index: int) -> "PodOrder":
        """Return what the pod of this index is told: it is the only one of a run, the member."""
        run_id = f"{self.run_id}.{self.members[index]}"
        host = f"{self.job}-{index}.{self.job}"
        return replace(self, run_id=run_id, num_pods=1, members=(), index=index, hosts=(host,))

    def host(self, index: int) -> str:
        """Return what a pod is called; the Service's name behind a dot makes it known to DNS."""
        return self.hosts[index] if self.hosts else f"{self.job}-{index}"

    def address(self, index: int) -> str:
        """Return the name by which DNS finds a pod."""
        return self.hosts[index] if self.hosts else f"{self.job}-{index}.{self.job}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodWords:
    """The command line of a program that lives as long as its pod: the files of the run's key, and of the pod's order."""

    key: str
    order: str


def read_order(path: str) -> PodOrder:
    """Return the order of a pod.

    Raises:
        CodecError: It is not one.
    """
    return codec.from_plain(PodOrder, atomic.read_json(path))


def joined(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return files with the pieces of large ones put together, as `start.py` does on a pod's disk."""
    found: dict[str, bytes] = {}
    for name in sorted(files):
        whole = name.partition(PIECE)[0]
        found[whole] = found.get(whole, b"") + files[name]
    return found


def own_host(environment: Mapping[str, str]) -> str | None:
    """Return the name by which DNS finds this pod; None outside of one."""
    path = environment.get(ORDER_VARIABLE)
    return read_order(path).address(own_index(environment)) if path is not None else None


def own_index(environment: Mapping[str, str]) -> int:
    """Return which pod of the run this is."""
    texts = (environment.get(name, "") for name in _INDEX_VARIABLES)
    first = environment.get(FIRST_INDEX_VARIABLE, "")
    index = next((int(text) for text in texts if text.isdecimal()), 0)
    return index + (int(first) if first.isdecimal() else 0)


# What the pod of a sweep's member is told: an order and a plan as of a run in one pod, made in the pod from those of the sweep.


_JOB_FILE = "pods-job"  # in the run directory: the Job that writes the record


def read_own(path: str, environment: Mapping[str, str]) -> tuple[PodOrder, RunPlan | None]:
    """Return what this pod is told, of a sweep what its member is told, and the plan of the run; None for a group's.

    Args:
        path: Of the order that came.
        environment: Of the pod.

    Raises:
        CodecError: It can't be read.
    """
    order, brought = read_order(path), os.path.dirname(path)
    if order.is_sweep and order.members:
        index = own_index(environment)
        plain = atomic.read_json(os.path.join(brought, SWEEP_FILE))
        sweep = codec.from_plain(SweepPlan, plain)
        return order.of_member(index), sweep.member_plan(order.members[index])
    plain = atomic.read_json(os.path.join(brought, PLAN_FILE))
    return order, codec.from_plain(RunPlan, plain) if plain is not None else None


def place_member(path: str, environment: Mapping[str, str], folder: str) -> str:
    """Write order and plan of this pod's member into a folder beside links to what else came; return the order's path.

    On a volume there may be the record of an earlier Job of the sweep: how the member ended then is forgotten.
    """
    order, plan = read_own(path, environment)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for name in (CODE_FILE, CALL_FILE):
        brought = os.path.join(os.path.dirname(path), name)
        if os.path.exists(brought) and not os.path.lexists(os.path.join(folder, name)):
            os.symlink(brought, os.path.join(folder, name))
    atomic.write_json(os.path.join(folder, PLAN_FILE), codec.to_plain(plan))
    atomic.write_json(os.path.join(folder, ORDER_FILE), codec.to_plain(order))
    _forget_earlier_end(order)
    return os.path.join(folder, ORDER_FILE)


def _forget_earlier_end(order: PodOrder) -> None:
    run_dir = order.run_dir
    os.makedirs(run_dir.path, mode=0o700, exist_ok=True)
    note = os.path.join(run_dir.path, _JOB_FILE)
    if atomic.read_json(note) == {"job": order.job}:
        return
    for left in (order.ended, run_dir.result, run_dir.cancelled):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(left)
    atomic.write_json(note, {"job": order.job})
