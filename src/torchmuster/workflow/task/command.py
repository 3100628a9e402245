"""Run the command of a task in its own view, and end it with everything that it started."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.model import codec, contract
from torchmuster.core.model.plan import NodeSetup
from torchmuster.core.node.output import RankOutput, Voice
from torchmuster.errors import MusterError
from torchmuster.launcher.node.shell import Transfer
from torchmuster.workflow.plan import GroupNodes, TrainingInput
from torchmuster.workflow.task import setup as task_setup
from torchmuster.workflow.task.data import start_checkpoint
from torchmuster.workflow.task.setup import TaskFacts, TaskOptions
from torchmuster.workflow.task.view import CommandView, open_view

Say = Callable[[str], None]


class TaskCommand:
    """One start of a task's command."""

    def __init__(self, facts: TaskFacts, options: TaskOptions, voice: Voice) -> None:
        self._facts = facts
        self._options = options
        self._voice = voice
        self._child: proc.Child | None = None
        self._checkpoints: list[Transfer] = []
        self.view: CommandView | None = None  # None before the start
        self._output: RankOutput | None = None

    @property
    def pid(self) -> int:
        """Return the pid of the process, the leader of its session; 0 before the start."""
        return self._child.pid if self._child is not None else 0

    worker_ticks = None  # for `muster exec`, which reads all from the process
    environment = None

    def start(self, output: RankOutput, earlier: CommandView | None, notice: Say) -> None:
        """Start the command; its output goes to `output`.

        Args:
            output: Receives the two streams, for the log and the terminal.
            earlier: The view of the previous attempt in the same working directory; its writes are
                kept.
            notice: Receives sentences for the user.

        Raises:
            MusterError: The command can't be started.
        """
        secrets = task_setup.read_credentials(self._facts.task)
        login = task_setup.credential_variables(self._facts.task, secrets)
        variables = task_setup.environment(self._facts, os.environ, self._options.gpus)
        variables |= {contract.TASK_SOCKET_VARIABLE: self._options.socket_path, **login}
        if self._facts.task.training is not None:
            words = training_words(self._facts, self._options)
        else:
            words = [self._facts.resolve(word) for word in self._facts.task.command]
        self.view = open_view(self._facts, self._options, secrets, notice)
        if earlier is not None:
            self.view.take_over(earlier)
        self._output = output
        stdout, stderr = output.open()
        try:
            self._child = self.view.start(words, variables, stdout, stderr)
        finally:
            os.close(stdout)
            os.close(stderr)
        for entry in self._facts.task.checkpoints:
            path = self.view.host_path(os.path.join("/", self._facts.resolve(entry.path)))
            self._checkpoints.append(
                start_checkpoint(entry, path, self._facts.resolve, self._voice.say, login)
            )

    def poll(self) -> int | None:
        """Return the exit status (negative for a signal), or None while it runs."""
        return self._child.poll() if self._child is not None else 0

    def has_begun(self) -> bool:
        """Return whether the command itself runs; not yet while its launcher sets up the view."""
        try:
            with open(f"/proc/{self.pid}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            return False
        launcher = [os.fsencode(word) for word in proc.node_program("view")]
        return len(words) > 1 and words[1:5] != launcher[1:]

    def terminate(self) -> None:
        """Send SIGTERM to the command and its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGTERM)

    def forward(self, signum: int) -> None:
        """Send a signal to each process of the command that catches it, since others would end."""
        for pid in (self.pid, *proc.descendants(self.pid)):
            if proc.catches_signal(pid, signum):
                proc.kill_quietly(pid, signum)

    def kill(self) -> None:
        """Send SIGKILL to everything that the command started."""
        if self.view is not None:
            self.view.kill()
        proc.kill_session(self.pid)
        for pid in proc.descendants(self.pid):
            proc.kill_quietly(pid)
        self.kill_leftovers()

    def has_processes(self) -> bool:
        """Return whether anything that the command started still runs."""
        roots = [transfer.child.pid for transfer in self._checkpoints]
        helpers = {*roots, *(pid for root in roots for pid in proc.descendants(root))}
        return any(pid not in helpers for pid in proc.descendants(os.getpid()))

    def kill_leftovers(self) -> bool:
        """Kill and reap what the command has left; return whether nothing is left."""
        return not proc.end_children(frozenset(t.child.pid for t in self._checkpoints))

    def read_end(self, status: int) -> tuple[int, int | None]:
        """Return the exit code as a shell shows it, and the signal or None.

        Raises:
            CommandFailedError: The command itself never started.
        """
        tail = self._output.tail() if self._output is not None else ()
        failure = self.view.why_not_begun(status, tail) if self.view is not None else None
        if failure is not None:
            raise failure
        return (128 - status, -status) if status < 0 else (status, None)

    def pids(self) -> set[int]:
        """Return the processes whose descendants belong to the command."""
        return {self.pid, *(self.view.pids() if self.view is not None else ())}

    async def finish(self) -> None:
        """Upload the checkpoints a last time; only report failures, since the command counts."""
        for transfer in self._checkpoints:
            transfer.end_input()
        for transfer in self._checkpoints:
            try:
                await transfer.finish()
            except MusterError as error:
                self._voice.say(f"the last checkpoint was not uploaded: {error.what}")
        self._checkpoints.clear()
        self.leave()

    def leave(self) -> None:
        """Remove what was put outside of the working directory."""
        if self.view is not None:
            self.view.close()


def training_words(facts: TaskFacts, options: TaskOptions) -> list[str]:
    """Return the command that runs a training task as `muster run` does."""
    training = facts.task.training
    if training is None:
        raise ValueError("not a training task")
    run_dir, plan = options.run_dir, options.plan
    args = tuple(facts.resolve(word) for word in training.args)
    folders = (facts.place.output, *make_folders(args, facts.place.output))
    nodes = atomic.read_json(run_dir.group(facts.group.name).nodes)
    start = TrainingInput(
        task=facts.task.name,
        training=replace(training, script=facts.resolve(training.script), args=args),
        folder=run_dir.training_folder(facts.task.name, facts.attempt),
        snapshots=os.path.join(run_dir.task_folder(facts.task.name), "snapshots"),
        cwd=plan.cwd,
        grace_s=plan.grace_s,
        node_setup=NodeSetup(lines=plan.setup, origin=plan.setup_origin),
        nodes=codec.from_plain(GroupNodes, nodes) if nodes is not None else None,
        folders=folders,
    )
    path = os.path.join(facts.place.path, "training.json")
    atomic.write_json(path, codec.to_plain(start))
    # Not isolated, because another package may provide the engine of its job's scheduler.
    return [sys.executable, proc.NODE_ENTRY, "training-task", path]


def make_folders(args: Sequence[str], output: str) -> list[str]:
    """Make and return the folders of files in `{{output}}` that arguments name: no shell does it.

    Raises:
        MusterError: A folder can't be made.
    """
    made: list[str] = []
    for word in args:
        path = os.path.normpath(word.partition("=")[2] if word.startswith("-") else word)
        if not path.startswith(f"{output}/"):
            continue
        folder = os.path.dirname(path)
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            what = f"the folder of the argument `{word}` can't be made"
            raise MusterError(what, where=folder, why=error.strerror) from error
        made.append(folder)
    return made
