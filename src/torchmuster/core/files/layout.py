"""All path names in a run directory, each with its only writer.

runs/<run_id>/
  logs/main/train/attempt-<k>/rank-<r>.log     the agent of that rank
  logs/main/train/attempt-<k>/rank-<r>.value   that rank, 0600: what a function has returned
  logs/agents/<node>.log          that agent, when it has no terminal
  logs/agents/<node>.setup.log    that agent: output of setup lines and --before
  groups/<group>/                 of a workflow: see `GroupDir`
  tasks/<task>/place-<p>/         its agent: see `WorkingFolder`, and the files of the task's view
  tasks/<task>/output             its agent: a link to the output of the attempt that counts
  logs/<group>/<task>/attempt-<k>/rank-0.log   its agent
and what `RunDir` names below.
"""

import contextlib
import enum
import json
import os
import re
from dataclasses import dataclass
from typing import Any

from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.plan import short_id as short_id  # noqa: PLC0414 - of run ids, too
from torchmuster.core.plainfile import open_plain

GROUP = "main"
TASK = "train"


class PathBelow:
    """A descriptor for the path of a file or folder below its owner's path."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type) -> str:
        """Return the path; on the class itself, the bare name."""
        return self._name if owner is None else os.path.join(owner.path, self._name)


def muster_home() -> str:
    """Return `$MUSTER_HOME`, default `~/.muster`."""
    return os.environ.get("MUSTER_HOME") or os.path.join(os.path.expanduser("~"), ".muster")


def runs_dir() -> str:
    """Return the folder of all runs."""
    return os.path.join(muster_home(), "runs")


class Kind(enum.Enum):
    """What a run directory is the record of."""

    RUN = "run"
    WORKFLOW = "workflow"
    SWEEP = "sweep"
    SESSION = "session"  # a run whose workers serve a session (`RunPlan.is_session`)


@dataclass(frozen=True, slots=True)
class RunDir:
    """The path names of one run."""

    path: str

    # For a training run.
    plan = PathBelow("plan.json")  # client: what will be started
    origin = PathBelow("origin.json")  # client: who asked for it, and with which code
    report = PathBelow("report.html")  # `muster report`: the page of the run
    report_log = PathBelow("report.log")  # client: why the page of a failed run could not be made
    secret = PathBelow("secret")  # client: the key of the channel, 0600
    member_request = PathBelow("pods/request.json")  # client: how the pods of a sweep are made
    call = PathBelow("call")  # client: the function of `torchmuster.launch`, 0600
    room = PathBelow("room")  # owner: space reserved for its result on a full disk
    owner = PathBelow("owner.json")  # client: who owns the run: pid, boot, host
    head = PathBelow("head.json")  # agent 0: where the head listens, 0600
    # Engine, when a head was lost: addresses of its replacement, for the agents that remain.
    moved = PathBelow("moved.json")
    # All nodes that may become the head: claims and votes (`core/files/claims.py`). Only where
    # another node may become it.
    succession = PathBelow("succession")
    # Head, one line per event, UTC, append only; all views are derived from it. In a workflow:
    # client.
    events = PathBelow("events.jsonl")
    # Head (client if the head was lost, and in a workflow): the verdict.
    result = PathBelow("result.json")
    # Client of a run in pods: why the cluster removed pods, by attempt.
    losses = PathBelow("losses.json")
    samples = PathBelow("samples.jsonl")  # head: periodic samples of all ranks
    logs = PathBelow(os.path.join("logs", GROUP, TASK))  # agents: a folder for each attempt
    unread = PathBelow("unread")  # process that shows output: backlog of a slow reader
    untold = PathBelow("untold")  # head: backlog for its owner
    supervisor_log = PathBelow("supervisor.log")  # a detached owner: its output
    notify = PathBelow("notify")  # client: who gets notices, 0600
    notified = PathBelow("notified")  # what delivers them: a line for each that was taken
    notifiers = PathBelow("notifiers")  # a file for each process that delivers: what it reaches
    # The script, by default; in a restarted run a link to those of the first.
    snapshots = PathBelow("snapshots")
    # Rank 0, by torchmuster.train: metrics, saves, the ledger.
    training = PathBelow("training.jsonl")
    training_fold = PathBelow("training.fold.json")  # any viewer: digest of a long training.jsonl

    # For a scheduler's job.
    job_script = PathBelow("job.sh")  # client: what the scheduler got
    job = PathBelow("job.json")  # client: scheduler and job of the run
    jobs = PathBelow("jobs.json")  # client: the jobs of a workflow's groups
    job_log = PathBelow("job.log")  # the scheduler: what the job's head says
    # The head of the newest link: the run's jobs so far, and whether another follows.
    links = PathBelow("links.json")
    cancelled = PathBelow("cancelled.json")  # client: no job may continue the run
    # The job's head: its environment, for agents on other nodes; 0600.
    environment = PathBelow("environment.json")
    # Client: torchmuster for job nodes that lack it, unpacked from the `.zip` next to it.
    package_copy = PathBelow("package")

    # For a workflow.
    spec = PathBelow("workflow.yaml")  # client: as the user wrote it
    rendered = PathBelow("rendered.yaml")  # client: templates rendered, runtime tokens kept
    workflow = PathBelow("workflow.json")  # client: the plan, there is no plan.json
    site = PathBelow("site.json")  # client: the site whose hosts run the tasks, over ssh

    # For a sweep.
    sweep = PathBelow("sweep.json")  # client: the plan, there is no plan.json
    arrays = PathBelow("arrays.json")  # client: the job array elements that are its members
    members = PathBelow("members")  # a run directory for each member, named by its run id

    @property
    def kind(self) -> Kind | None:
        """What the directory is the record of, by the name of its plan; None without a plan."""
        plans = {self.workflow: Kind.WORKFLOW, self.sweep: Kind.SWEEP, self.plan: Kind.RUN}
        return next((kind for path, kind in plans.items() if os.path.isfile(path)), None)

    @property
    def has_jobs(self) -> bool:
        """Whether jobs of a scheduler are noted: of a run, a workflow's groups or a sweep's members."""
        return any(map(os.path.exists, (self.job, self.jobs, self.arrays)))

    def group(self, group: str) -> "GroupDir":
        """The folder of a group of a workflow."""
        return GroupDir(os.path.join(self.path, "groups", group))

    def task_folder(self, task: str) -> str:
        """The folder of a task of a workflow."""
        return os.path.join(self.path, "tasks", task)

    def task_output(self, task: str) -> str:
        """The output of the attempt that counts, as a link."""
        return os.path.join(self.task_folder(task), "output")

    def training_folder(self, task: str, attempt: int) -> str:
        """The run directory of a training task in one attempt."""
        return os.path.join(self.task_folder(task), "training", f"attempt-{attempt}")

    def task_log(self, group: str, task: str, attempt: int) -> str:
        """All output of a task's command in one attempt."""
        name = f"attempt-{attempt}"
        return os.path.join(self.path, "logs", group, task, name, "rank-0.log")

    def attempt_logs(self, attempt: int) -> str:
        """The folder of one attempt's logs."""
        return os.path.join(self.logs, f"attempt-{attempt}")

    def rank_log(self, attempt: int, rank: int) -> str:
        """All output of one rank in one attempt."""
        return os.path.join(self.attempt_logs(attempt), f"rank-{rank}.log")

    def rank_value(self, attempt: int, rank: int) -> str:
        """The value that one rank's function returned in one attempt; it travels with its log."""
        return os.path.join(self.attempt_logs(attempt), f"rank-{rank}.value")

    def agent_log(self, node: str) -> str:
        """The log of the agent of one node."""
        return os.path.join(self.path, "logs", "agents", f"{node}.log")

    def setup_log(self, node: str) -> str:
        """The output of setup lines and `--before` commands on one node."""
        return os.path.join(self.path, "logs", "agents", f"{node}.setup.log")


@dataclass(frozen=True, slots=True)
class GroupDir:
    """The path names of one group of a workflow; its head writes them unless noted otherwise."""

    path: str

    head = PathBelow("head.json")  # where it listens, 0600
    start = PathBelow("start.json")  # client: orders for the head: first attempts, GPUs
    events = PathBelow("events.jsonl")  # one line per event
    result = PathBelow("result.json")  # how the group ended
    nodes = PathBelow("nodes.json")  # the nodes of the job that each task has
    network = PathBelow("network.json")  # the parts of a private network, 0600
    job_script = PathBelow("job.sh")  # client: what the scheduler got
    job = PathBelow("job.json")  # client: the job of the group
    job_log = PathBelow("job.log")  # the scheduler: what the job's head says
    environment = PathBelow("environment.json")  # its variables, for agents on other nodes; 0600


@dataclass(frozen=True, slots=True)
class WorkingFolder:
    """The working directory of a task: one for each fresh start."""

    path: str

    output = PathBelow("output")  # the value of `{{output}}`
    work = PathBelow("work")  # the directory that a command starts in
    view = PathBelow("view")  # parts of the private view of the file system

    def input(self, number: int) -> str:
        """The folder for `{{input:N}}`."""
        return os.path.join(self.path, "input", str(number))


# Read the end of a log without reading the whole log.


def last_lines(path: str, num_lines: int, num_bytes: int = 4096) -> list[str]:
    """Return the last lines of a text file, for a progress bar its last state; [] if unreadable."""
    from torchmuster.core.model.lines import last_state  # late: a spawner imports torch first

    text = last_bytes(path, num_bytes).decode(errors="replace").removesuffix("\n")
    return [last_state(line) for line in text.split("\n")][-num_lines:] if text else []


def last_bytes(path: str, num_bytes: int) -> bytes:
    """Return the last bytes of a file; empty if it can't be read."""
    try:
        with open_plain(path) as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - num_bytes))
            return log.read(num_bytes)
    except OSError:
        return b""


def size_of(path: str) -> int:
    """Return the length of a file; 0 if it does not exist."""
    try:
        return os.stat(path).st_size
    except OSError:  # usually not written yet
        return 0


# What the end of a run's record tells a successor.


_LINES = 200  # searched for the last attempt


def trained_last(plan: RunPlan, run_dir: RunDir) -> frozenset[int]:
    """Return the places that had ranks in the last attempt; empty if that can't be read."""
    places = {name: place for place, name in enumerate(plan.node_names)}
    for line in reversed(last_lines(run_dir.events, _LINES, _LINES << 10)):
        if '"event":"attempt_started"' in line:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                names = [node["node"] for node in json.loads(line)["nodes"]]
                return frozenset(places[name] for name in names if name in places)
    return frozenset()


def near(path: str) -> str:
    """Return a path relative to the working directory, unless it is outside or that is `/`."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") or os.getcwd() == "/" else relative


def member_of_id(run_id: str) -> tuple[str, int] | None:
    """Return the sweep and the member's number encoded in a run id, or None."""
    sweep, _, number = run_id.rpartition(".")
    return (sweep, int(number)) if sweep and re.fullmatch(r"\d{1,6}", number) else None
