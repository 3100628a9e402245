"""Runs of workflow files with real processes, each with a home of its own that no process outlives."""

import json
import os
from pathlib import Path

import pytest

from kit.command import MUSTER, muster_env, run_muster, spawned
from kit.waiting import wait_until

LIMIT_S = 180.0


class Workflow:
    """One `muster submit`, from its file to its end."""

    def __init__(self, folder, text, options, muster=MUSTER, env=None, **user):
        self.folder = folder
        self.home = folder / "home"
        self.run_dir = self.home / "runs" / "r"
        (folder / "w.yaml").write_text(text)
        words = ["submit", "w.yaml", "--run-id", "r", "--backoff", "0.2", *options]
        user |= {"cwd": folder, "env": muster_env(self.home, **(env or {}))}
        with (folder / "out.txt").open("ab") as out:
            self.process = spawned([*muster, *words], stdout=out, **user)

    def muster(self, *words):
        """Run another command beside it."""
        return run_muster(*words, env=muster_env(self.home), cwd=self.folder, limit_s=60)

    @property
    def out(self):
        """Return what it has shown so far."""
        return (self.folder / "out.txt").read_text()

    def wait(self, limit_s=LIMIT_S):
        """Wait for its end and return the exit code."""
        return self.process.wait(limit_s)

    def wait_for_file(self, name):
        """Wait until a command has written this file; an early end of the workflow is a failure."""

        def is_there():
            assert self.process.poll() is None, f"it ended before {name} was there: {self.out}"
            return (self.folder / name).exists()

        wait_until(is_there, name)

    def result(self):
        """Return result.json."""
        return json.loads((self.run_dir / "result.json").read_text())

    def output(self, task):
        """Return the folder with a task's output."""
        return self.run_dir / "tasks" / task / "output"

    def events(self, group, name):
        """Return a group's events of this name."""
        lines = (self.run_dir / "groups" / group / "events.jsonl").read_text().splitlines()
        return [event for line in lines if (event := json.loads(line))["event"] == name]

    def attempts(self, group, task):
        """Return how often a task's command was started."""
        return sum(event["task"] == task for event in self.events(group, "task_started"))

    def pids(self, *words):
        """Return this run's processes whose command lines have all these words."""
        needed = [str(self.home).encode(), *(word.encode() for word in words)]
        return [pid for pid, line in _command_lines() if all(word in line for word in needed)]

    def pid(self, *words):
        """Return the one process with these words; what it has forked has the same ones until it executes its own command."""
        found = self.pids(*words)
        (pid,) = [pid for pid in found if _parent(pid) not in found]
        return pid

    def processes(self):
        """Return every process that belongs to the run: by command line or by environment."""
        mark = f"MUSTER_HOME={self.home}".encode()
        return [pid for pid in _pids() if mark in read(f"/proc/{pid}/environ").split(b"\0")]

    def end(self):
        """End what is left and say how many processes there were."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(LIMIT_S)
        try:
            wait_until(lambda: not self.processes(), "the end of all processes")
        finally:
            for pid in self.processes():
                os.kill(pid, 9)


def _pids():
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def read(path):
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _parent(pid):
    fields = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else None


def _command_lines():
    return [(pid, read(f"/proc/{pid}/cmdline")) for pid in _pids()]


@pytest.fixture
def start_workflow(tmp_path):
    """Return a function that starts a workflow; at the end no process of it may be left."""
    started = []

    def start(text, *options):
        text = text.replace("FOLDER", str(tmp_path))
        started.append(Workflow(tmp_path, text, options))
        return started[-1]

    yield start
    for workflow in started:
        workflow.end()


@pytest.fixture
def run_workflow(start_workflow):
    """Return a function that runs a workflow to its end."""

    def run(text, *options, limit_s=LIMIT_S):
        workflow = start_workflow(text, *options)
        workflow.code = workflow.wait(limit_s)
        return workflow

    return run
