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
  training.jsonl                  rank 0, when the script uses torchmuster.train
  snapshots/                      the script
"""

import os
from dataclasses import dataclass

GROUP = "main"
TASK = "train"


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
