"""Every path name of a run directory, each with its one writer.

runs/<run_id>/
  plan.json                       client     what will be started
  secret                          client     the channel's key, 0600
  owner.json                      client     who owns the run: pid, boot, host
  head.json                       agent 0    where the coordinator listens, 0600
  events.jsonl                    coordinator  one line per event, UTC, append only
  result.json                     coordinator (the client, when the head was lost)
  logs/main/train/attempt-<k>/rank-<r>.log     the agent of that rank
  logs/agents/<node>.log          that agent, when it has no terminal
  logs/agents/<node>.setup.log    that agent: what setup lines and --before said
  job.sh, job.json                client     what a scheduler got, and its answer
  job.log                         the scheduler, what the job's head says
  links.json                      the head of the newest link   the jobs that the run has had
  cancelled.json                  client     no job may continue it
  training.jsonl                  rank 0, when the script uses torchmuster.train
  snapshots/                      the script

and of a workflow:
  workflow.yaml                   client     as the user wrote it
  rendered.yaml                   client     without templates; runtime tokens still stand
  workflow.json                   client     the plan (it has no plan.json)
  events.jsonl, result.json       client     groups that wait, start and end; the verdict
  site.json                       client     the site whose hosts the tasks go to, by ssh
  groups/<group>/head.json        its head   where it listens, 0600
  groups/<group>/start.json       client     what the head is told: first attempts, GPUs
  groups/<group>/events.jsonl     its head   one line per event
  groups/<group>/result.json      its head
  tasks/<task>/place-<p>/         its agent  output/, input/<n>/, work/ and what the task's view of files needs
  tasks/<task>/output             its agent  a link to the output of the attempt that counts
  logs/<group>/<task>/attempt-<k>/rank-0.log   its agent
"""

import os
import re
from dataclasses import dataclass

GROUP = "main"
TASK = "train"
_STAMP = re.compile(r"\d{8}-\d{6}-(?=[A-Za-z0-9])")


def short_id(run_id: str) -> str:
    """Return a run id without its time stamp: `train-3f2a`, which every command takes too."""
    return _STAMP.sub("", run_id, count=1) if _STAMP.match(run_id) else run_id


def muster_home() -> str:
    """Return `$MUSTER_HOME`, default `~/.muster`."""
    return os.environ.get("MUSTER_HOME") or os.path.join(os.path.expanduser("~"), ".muster")


def runs_dir() -> str:
    """Return the folder of all runs."""
    return os.path.join(muster_home(), "runs")


@dataclass(frozen=True, slots=True)
class RunDir:
    """The path names of one run."""

    path: str

    @property
    def plan(self) -> str:
        """What will be started."""
        return os.path.join(self.path, "plan.json")

    @property
    def secret(self) -> str:
        """The key of the channel."""
        return os.path.join(self.path, "secret")

    @property
    def owner(self) -> str:
        """Who owns the run."""
        return os.path.join(self.path, "owner.json")

    @property
    def head(self) -> str:
        """Where the coordinator listens."""
        return os.path.join(self.path, "head.json")

    @property
    def events(self) -> str:
        """The record that all views are made from."""
        return os.path.join(self.path, "events.jsonl")

    @property
    def result(self) -> str:
        """The verdict."""
        return os.path.join(self.path, "result.json")

    @property
    def snapshots(self) -> str:
        """Where the script's snapshots go by default; of a restarted run a link to the first's."""
        return os.path.join(self.path, "snapshots")

    @property
    def training(self) -> str:
        """What the training library records: metrics, saves, the ledger."""
        return os.path.join(self.path, "training.jsonl")

    @property
    def workflow(self) -> str:
        """The plan of a workflow."""
        return os.path.join(self.path, "workflow.json")

    @property
    def spec(self) -> str:
        """The workflow file as the user wrote it."""
        return os.path.join(self.path, "workflow.yaml")

    @property
    def rendered(self) -> str:
        """The workflow file without templates."""
        return os.path.join(self.path, "rendered.yaml")

    def group(self, group: str) -> "GroupDir":
        """What one group of a workflow has."""
        return GroupDir(os.path.join(self.path, "groups", group))

    def task_folder(self, task: str) -> str:
        """Everything that one task of a workflow has."""
        return os.path.join(self.path, "tasks", task)

    def task_output(self, task: str) -> str:
        """The output of the attempt that counts: a link."""
        return os.path.join(self.task_folder(task), "output")

    def training_folder(self, task: str, attempt: int) -> str:
        """Where the run directory is that a training task makes in one attempt."""
        return os.path.join(self.task_folder(task), "training", f"attempt-{attempt}")

    def task_log(self, group: str, task: str, attempt: int) -> str:
        """All output of a task's command in one attempt."""
        name = f"attempt-{attempt}"
        return os.path.join(self.path, "logs", group, task, name, "rank-0.log")

    @property
    def job_script(self) -> str:
        """What the scheduler got."""
        return os.path.join(self.path, "job.sh")

    @property
    def package_copy(self) -> str:
        """A copy of torchmuster for nodes of a job that lack it; unpacked from the `.zip` beside it."""
        return os.path.join(self.path, "package")

    @property
    def job(self) -> str:
        """Which job of which scheduler conducts the run."""
        return os.path.join(self.path, "job.json")

    @property
    def job_log(self) -> str:
        """What the head of the job says."""
        return os.path.join(self.path, "job.log")

    @property
    def links(self) -> str:
        """The jobs that the run has had, and whether another follows."""
        return os.path.join(self.path, "links.json")

    @property
    def cancelled(self) -> str:
        """There when the user has cancelled the run: no job may continue it."""
        return os.path.join(self.path, "cancelled.json")

    @property
    def environment(self) -> str:
        """The variables of a job's head, for agents on other nodes; 0600."""
        return os.path.join(self.path, "environment.json")

    @property
    def jobs(self) -> str:
        """Which jobs of which scheduler conduct the groups of a workflow."""
        return os.path.join(self.path, "jobs.json")

    @property
    def site(self) -> str:
        """Which site of ssh the tasks of a workflow go to."""
        return os.path.join(self.path, "site.json")

    @property
    def supervisor_log(self) -> str:
        """What a detached supervisor says."""
        return os.path.join(self.path, "supervisor.log")

    @property
    def logs(self) -> str:
        """The folder of the attempts' logs."""
        return os.path.join(self.path, "logs", GROUP, TASK)

    def attempt_logs(self, attempt: int) -> str:
        """The folder of one attempt's logs."""
        return os.path.join(self.logs, f"attempt-{attempt}")

    def rank_log(self, attempt: int, rank: int) -> str:
        """All output of one rank in one attempt."""
        return os.path.join(self.attempt_logs(attempt), f"rank-{rank}.log")

    def agent_log(self, node: str) -> str:
        """What the agent of one node says."""
        return os.path.join(self.path, "logs", "agents", f"{node}.log")

    def setup_log(self, node: str) -> str:
        """What the setup lines and the commands before the workers said on one node."""
        return os.path.join(self.path, "logs", "agents", f"{node}.setup.log")


@dataclass(frozen=True, slots=True)
class GroupDir:
    """The path names of one group of a workflow."""

    path: str

    @property
    def head(self) -> str:
        """Where the head of the group listens."""
        return os.path.join(self.path, "head.json")

    @property
    def job_script(self) -> str:
        """What the scheduler got."""
        return os.path.join(self.path, "job.sh")

    @property
    def job(self) -> str:
        """Which job conducts the group."""
        return os.path.join(self.path, "job.json")

    @property
    def job_log(self) -> str:
        """What the head of the job says."""
        return os.path.join(self.path, "job.log")

    @property
    def environment(self) -> str:
        """The variables of the group's head, for agents on other nodes; 0600."""
        return os.path.join(self.path, "environment.json")

    @property
    def nodes(self) -> str:
        """Which nodes of the job each task has."""
        return os.path.join(self.path, "nodes.json")

    @property
    def start(self) -> str:
        """What the head is told."""
        return os.path.join(self.path, "start.json")

    @property
    def network(self) -> str:
        """The parts of a private network, 0600."""
        return os.path.join(self.path, "network.json")

    @property
    def events(self) -> str:
        """The record of the group."""
        return os.path.join(self.path, "events.jsonl")

    @property
    def result(self) -> str:
        """How the group ended."""
        return os.path.join(self.path, "result.json")


@dataclass(frozen=True, slots=True)
class WorkingFolder:
    """The working place of a task: one for each fresh start."""

    path: str

    @property
    def output(self) -> str:
        """What `{{output}}` stands for."""
        return os.path.join(self.path, "output")

    @property
    def work(self) -> str:
        """The directory that a command starts in."""
        return os.path.join(self.path, "work")

    @property
    def view(self) -> str:
        """What the private view of the file system is made of."""
        return os.path.join(self.path, "view")

    def input(self, number: int) -> str:
        """What `{{input:N}}` stands for."""
        return os.path.join(self.path, "input", str(number))
