"""The order of a pod: a file in its Secrets, in which the client says what the pod is to do."""

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
FINAL_CODE = 113  # the run has ended, and the Job must end with it
AGAIN_CODE = 75  # this pod was taken away: the Job makes a replacement
ORDER_FILE, KEY_FILE, PLAN_FILE = "order.json", "key", "plan.json"
PACKAGE_FILE, CODE_FILE, START_FILE = "package.txz", "code.tar.gz", "start.py"
CALL_FILE = "call"  # the call of a function
SWEEP_FILE = "sweep.json"  # the plan of a sweep, named as in its run directory
PIECE = ".part-"  # precedes the number of a piece, if a file is larger than a Secret
KEPT_PREFIX = "code-"  # of archives that stay on a volume for later runs
PROGRAMS_VARIABLE = "MUSTER_PROGRAMS"  # in sessions: the command of our programs
KEY_VARIABLE = "MUSTER_KEY"  # in sessions: the path of the pod's key
ORDER_VARIABLE = "MUSTER_ORDER"  # in sessions: the path of the pod's order
DISK_BYTES_VARIABLE = "MUSTER_POD_DISK_BYTES"  # the limit of its disk
CLAIM_VARIABLE = "MUSTER_FIRST_POD"  # for an owner and its children: identifies their first pod
REPLACED_CODE = 1 << 16  # not an exit code, but an answer: a later first pod has the run
READS_VARIABLE = "MUSTER_POD_READS"  # in a pod that owns nothing: it only sends what is on a volume
MEMORY_BYTES_VARIABLE = "MUSTER_POD_MEMORY_BYTES"  # the memory that it requests
NO_ROOM_FILE = "no-room"
NUM_FILES_KEY = "num_files"  # in a member's last message, next to its result
VALUES_KEY = "training"  # there, too: the newest values of all metrics, as a training event
NODES_FILE = "nodes.json"  # of a group: the pods of each task
WORKFLOW_FILE = "workflow.json"  # of a group, named as in its run directory
MOVED_FILE = "moved.json.xz"  # the same in transit: the plan with the paths in the pods
CREDENTIALS_FILE = "credentials.toml"
SUBMITTED_FILE = (
    "workflow.json.xz"  # of a group: the plan for clients elsewhere, with the client's paths
)
STAMPS_FILE = "code.stamps.json"  # next to what was unpacked: it is complete
INDEX_VARIABLE = "MUSTER_POD_INDEX"
_INDEX_VARIABLES = (INDEX_VARIABLE, "JOB_COMPLETION_INDEX")
FIRST_INDEX_VARIABLE = "MUSTER_POD_FIRST"  # for the pods of a group's second and later Jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOrder:
    """A run, a sweep, or a workflow group, as its pods know it.

    Attributes:
        job: The name of its Job and Service; a pod's host name is JOB-INDEX.
        port: The pod server's port in every pod; the head uses the next one, on the first pod's
            loopback.
        home: $MUSTER_HOME in the pods.
        code_root: The path of the code folder on the client.
        code_bytes: The size of the code archive if it does not travel in a Secret; else None.
        code_sha: The checksum of the archive.
        warn_s: How long before the time limit to warn the workers.
        start_limit_s: How long the client waits for the first pod; None for no limit, as in a
            queue.
        time_limit_s: Counted from the first start of the run; None for no limit.
        group: The group of a workflow; None for a run.
        is_sweep: Each pod is a member of a sweep.
        members: The numbers of the members, by the index of their pod; empty in a member's own
            order.
        index: The index of the first pod in its Job: for a sweep member its own.
        hosts: The host names of a group's pods, with their Service; they may belong to several
            Jobs.
        has_volume: All pods see the same `home`.
        join_s: How long a group waits for its pods, not counting time in which the cluster has no
            room.
        keep_s: How long the ended first pod waits for a client to fetch what only the pods have.
        environment: Variables of everything that runs in the pods.
        continues: The run on the volume whose snapshots this one resumes from; None for none.
        saved_step: The last step that it saved, by its record; the snapshot has to be there.
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
        """Return the folder of this order's files in the first pod; for a run, its directory."""
        return self.run_dir.path if self.group is None else self.run_dir.group(self.group).path

    @property
    def ended(self) -> str:
        """Return the path of the note that nothing more will be written."""
        return os.path.join(self.folder, ENDED_FILE)

    @property
    def held(self) -> str:
        """Return the path of the note that a client holds result, files, logs and record."""
        return os.path.join(self.folder, HELD_FILE)

    @property
    def archive(self) -> str:
        """Return where the code archive is, or will arrive."""
        return os.path.join(self.folder, CODE_FILE)

    @property
    def kept(self) -> str | None:
        """Return where a client's archive is kept for later runs; None without a volume."""
        name = f"{KEPT_PREFIX}{self.code_sha}.tar.gz"
        return os.path.join(self.home, "cache", name) if self.has_volume else None

    @property
    def stamps(self) -> str:
        """Return the path of the note that the archive has been unpacked."""
        return os.path.join(self.folder, STAMPS_FILE)

    @property
    def no_room(self) -> str:
        """Return the path of a client's note that the cluster has no room; it must be fresh."""
        return os.path.join(self.folder, NO_ROOM_FILE)

    @property
    def head_port(self) -> int:
        """Return the port of the head for clients."""
        return self.port + 1

    def of_member(self, index: int) -> "PodOrder":
        """Return the order of one member's pod: that of a run with a single pod."""
        run_id = f"{self.run_id}.{self.members[index]}"
        host = f"{self.job}-{index}.{self.job}"
        return replace(self, run_id=run_id, num_pods=1, members=(), index=index, hosts=(host,))

    def host(self, index: int) -> str:
        """Return the host name of a pod, without the Service where one Job has all pods."""
        return self.hosts[index] if self.hosts else f"{self.job}-{index}"

    def address(self, index: int) -> str:
        """Return the name of a pod that DNS resolves."""
        return self.hosts[index] if self.hosts else f"{self.job}-{index}.{self.job}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodWords:
    """The command line of a program that lives as long as its pod: the files of key and order."""

    key: str
    order: str


def read_order(path: str) -> PodOrder:
    """Read a pod's order.

    Raises:
        CodecError: It is not an order.
    """
    return codec.from_plain(PodOrder, atomic.read_json(path))


def joined(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Join the pieces of large files, as `start.py` does on a pod's disk."""
    found: dict[str, bytes] = {}
    for name in sorted(files):
        whole = name.partition(PIECE)[0]
        found[whole] = found.get(whole, b"") + files[name]
    return found


def own_host(environment: Mapping[str, str]) -> str | None:
    """Return this pod's DNS name; None outside a pod."""
    path = environment.get(ORDER_VARIABLE)
    return read_order(path).address(own_index(environment)) if path is not None else None


def own_index(environment: Mapping[str, str]) -> int:
    """Return the index of this pod in the run."""
    texts = (environment.get(name, "") for name in _INDEX_VARIABLES)
    first = environment.get(FIRST_INDEX_VARIABLE, "")
    index = next((int(text) for text in texts if text.isdecimal()), 0)
    return index + (int(first) if first.isdecimal() else 0)


# A sweep member's own order and plan, made in the pod from the sweep's: those of a run in one pod.


_JOB_FILE = "pods-job"  # in the run directory: names the Job that writes the record


def read_own(path: str, environment: Mapping[str, str]) -> tuple[PodOrder, RunPlan | None]:
    """Return this pod's order (in a sweep its member's) and the run's plan; None for a group's.

    Args:
        path: The path of the order that came.
        environment: The environment of the pod.

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
    """Write order and plan of this pod's member, with links to its files; return the order's path.

    A volume may have the member's record from an earlier Job of the sweep: remove its end.
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
