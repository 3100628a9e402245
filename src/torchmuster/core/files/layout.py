"""Every path name in a run directory, and its one writer.

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
from torchmuster.core.plainfile import open_plain

GROUP = "main"
TASK = "train"
_STAMP = re.compile(r"\d{8}-\d{6}-(?=[A-Za-z0-9])")


class PathBelow:
    """The path of a file or folder below that of its owner."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type) -> str:
        """Return the path; of the class itself, the name."""
        return self._name if owner is None else os.path.join(owner.path, self._name)


def short_id(run_id: str) -> str:
    """Return a run id without its time stamp, `train-3f2a`, which every command accepts too."""
    return _STAMP.sub("", run_id, count=1) if _STAMP.match(run_id) else run_id


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
    SESSION = "session"  # a run whose program is a door (`RunPlan.is_session`)


@dataclass(frozen=True, slots=True)
class RunDir:
    """The path names of one run."""

    path: str

    # Of a training run.
    plan = PathBelow("plan.json")  # client: what will be started
    origin = PathBelow("origin.json")  # client: who asked for it, and with which code
    report = PathBelow("report.html")  # `muster report`: the page of the run
    report_log = PathBelow("report.log")  # client: why the page of a failed run could not be made
    secret = PathBelow("secret")  # client: the key of the channel, 0600
    member_request = PathBelow("pods/request.json")  # client: what pods of a sweep are made of
    call = PathBelow("call")  # client: the function of `torchmuster.launch`, 0600
    room = PathBelow("room")  # owner: kept for its result, should the disk be full
    owner = PathBelow("owner.json")  # client: who owns the run: pid, boot, host
    head = PathBelow("head.json")  # agent 0: where the head listens, 0600
    # Engine, when a head was lost: the addresses of the one in its place, for the agents that stay.
    moved = PathBelow("moved.json")
    # All that may be its head: who was, and who has lost it (`core/files/claims.py`). Only where another node may become it.
    succession = PathBelow("succession")
    # Head, one line per event, UTC, append only: all views are made from it. Of a workflow, client.
    events = PathBelow("events.jsonl")
    # Head (client, when the head was lost; of a workflow, client): the verdict.
    result = PathBelow("result.json")
    losses = PathBelow(
        "losses.json"
    )  # client of a run in pods: why the cluster took some, by attempt
    samples = PathBelow("samples.jsonl")  # head: how all ranks stood, from time to time
    logs = PathBelow(os.path.join("logs", GROUP, TASK))  # agents: a folder for each attempt
    unread = PathBelow("unread")  # who shows the output: what a slow reader has not taken yet
    untold = PathBelow("untold")  # head: what its owner has not taken yet
    supervisor_log = PathBelow("supervisor.log")  # a detached supervisor: what it says
    # The script, by default; of a restarted run a link to the first's.
    snapshots = PathBelow("snapshots")
    training = PathBelow(
        "training.jsonl"
    )  # rank 0, by torchmuster.train: metrics, saves, the ledger
    training_fold = PathBelow("training.fold.json")  # whoever looks: what a long one says so far

    # Of a job of a scheduler.
    job_script = PathBelow("job.sh")  # client: what the scheduler got
    job = PathBelow("job.json")  # client: which job of which scheduler conducts the run
    jobs = PathBelow("jobs.json")  # client: which jobs conduct the groups of a workflow
    job_log = PathBelow("job.log")  # the scheduler: what the job's head says
    # The head of the newest link: the jobs that the run has had, and whether another follows.
    links = PathBelow("links.json")
    cancelled = PathBelow("cancelled.json")  # client: no job may continue the run
    # The job's head: its variables, for agents on other nodes; 0600.
    environment = PathBelow("environment.json")
    # Client: torchmuster for nodes of a job that lack it; unpacked from the `.zip` beside it.
    package_copy = PathBelow("package")

    # Of a workflow.
    spec = PathBelow("workflow.yaml")  # client: as the user wrote it
    rendered = PathBelow("rendered.yaml")  # client: without templates; runtime tokens still stand
    workflow = PathBelow("workflow.json")  # client: the plan, there is no plan.json
    site = PathBelow("site.json")  # client: the site whose hosts the tasks go to, by ssh

    # Of a sweep.
    sweep = PathBelow("sweep.json")  # client: the plan, there is no plan.json
    arrays = PathBelow("arrays.json")  # client: which elements of which job arrays are its members
    members = PathBelow("members")  # a run directory for each member, named by its run id

    @property
    def kind(self) -> Kind | None:
        """What it is the record of, by the name of its plan; None where it has none."""
        plans = {self.workflow: Kind.WORKFLOW, self.sweep: Kind.SWEEP, self.plan: Kind.RUN}
        return next((kind for path, kind in plans.items() if os.path.isfile(path)), None)

    def group(self, group: str) -> "GroupDir":
        """The folder of a group of a workflow."""
        return GroupDir(os.path.join(self.path, "groups", group))

    def task_folder(self, task: str) -> str:
        """The folder of a task of a workflow."""
        return os.path.join(self.path, "tasks", task)

    def task_output(self, task: str) -> str:
        """The output of the attempt that counts: a link."""
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
        """What the function of one rank has returned in one attempt: beside its log, so it travels as that does."""
        return os.path.join(self.attempt_logs(attempt), f"rank-{rank}.value")

    def agent_log(self, node: str) -> str:
        """The log of the agent of one node."""
        return os.path.join(self.path, "logs", "agents", f"{node}.log")

    def setup_log(self, node: str) -> str:
        """The output of setup lines and of commands before the workers on one node."""
        return os.path.join(self.path, "logs", "agents", f"{node}.setup.log")


@dataclass(frozen=True, slots=True)
class GroupDir:
    """The path names of one group of a workflow; without another note, its head is the writer."""

    path: str

    head = PathBelow("head.json")  # where it listens, 0600
    start = PathBelow("start.json")  # client: what the head is told: first attempts, GPUs
    events = PathBelow("events.jsonl")  # one line per event
    result = PathBelow("result.json")  # how the group ended
    nodes = PathBelow("nodes.json")  # which nodes of the job each task has
    network = PathBelow("network.json")  # the parts of a private network, 0600
    job_script = PathBelow("job.sh")  # client: what the scheduler got
    job = PathBelow("job.json")  # client: which job conducts the group
    job_log = PathBelow("job.log")  # the scheduler: what the job's head says
    environment = PathBelow("environment.json")  # its variables, for agents on other nodes; 0600


@dataclass(frozen=True, slots=True)
class WorkingFolder:
    """The working directory of a task: one for each fresh start."""

    path: str

    output = PathBelow("output")  # what `{{output}}` stands for
    work = PathBelow("work")  # the directory that a command starts in
    view = PathBelow("view")  # what the private view of the file system is made of

    def input(self, number: int) -> str:
        """The folder for `{{input:N}}`."""
        return os.path.join(self.path, "input", str(number))


# The end of a log, for a message, without reading the whole log.


_BLOCK_BYTES = 1 << 16


def last_lines(path: str, num_lines: int, num_bytes: int = 4096) -> list[str]:
    """Return the last lines of a text file from its last bytes, of a progress bar its last state; none when it can't be read."""
    from torchmuster.core.model.lines import last_state  # a spawner imports torch before

    text = last_bytes(path, num_bytes).decode(errors="replace").removesuffix("\n")
    return [last_state(line) for line in text.split("\n")][-num_lines:] if text else []


def last_bytes(path: str, num_bytes: int) -> bytes:
    """Return the last bytes of a file; none when it can't be read."""
    try:
        with open_plain(path) as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - num_bytes))
            return log.read(num_bytes)
    except OSError:
        return b""


def size_of(path: str) -> int:
    """Return the length of a file; 0 for one that is not there."""
    try:
        return os.stat(path).st_size
    except OSError:  # the usual case: nobody has written it yet
        return 0


def offset_of_last_lines(path: str, num_lines: int) -> int:
    """Return the offset of the last lines of a file in bytes; 0 if it has fewer or can't be read."""
    try:
        with open_plain(path) as file:
            end = file.seek(0, os.SEEK_END)
            if num_lines == 0:
                return end
            position, found = end, 0
            while position > 0:
                begin = max(0, position - _BLOCK_BYTES)
                file.seek(begin)
                block = file.read(position - begin)
                at = len(block) - 1 if position == end and block.endswith(b"\n") else len(block)
                while (at := block.rfind(b"\n", 0, at)) >= 0:
                    found += 1
                    if found == num_lines:
                        return begin + at + 1
                position = begin
    except OSError:
        pass
    return 0


# What the end of a run's record says to whoever goes on with the run.


_LINES = 200  # are searched for the last attempt


def trained_last(plan: RunPlan, run_dir: RunDir) -> frozenset[int]:
    """Return the places that had ranks in the last attempt; none where that can't be read."""
    places = {name: place for place, name in enumerate(plan.node_names)}
    for line in reversed(last_lines(run_dir.events, _LINES, _LINES << 10)):
        if '"event":"attempt_started"' in line:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                names = [node["node"] for node in json.loads(line)["nodes"]]
                return frozenset(places[name] for name in names if name in places)
    return frozenset()


def near(path: str) -> str:
    """Return a path as it is typed from here, where that is shorter; from `/` it would be so by one character."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") or os.getcwd() == "/" else relative


def member_of_id(run_id: str) -> tuple[str, int] | None:
    """Return the sweep and the number of a member from what may be its run id."""
    sweep, _, number = run_id.rpartition(".")
    return (sweep, int(number)) if sweep and re.fullmatch(r"\d{1,6}", number) else None
