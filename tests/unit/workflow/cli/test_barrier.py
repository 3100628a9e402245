"""`muster barrier` and `torchmuster.barrier()` in processes of their own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from kit.command import SOURCE, spawned
from kit.waiting import wait_until
from torchmuster.core.model.contract import TASK_SOCKET_VARIABLE
from unit.workflow.fake_head import FakeHead

DEADLINE_S = 60.0
COMMAND = "from torchmuster.core.cli.main import main;main()"
GARBAGE = [b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", b"MUSTERCH" + b"\xff" * 200, b"1\n", b"{\n"]


class Process:
    """A command whose standard error is read line by line while it runs."""

    def __init__(self, *argv, **variables):
        environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin", **variables}
        self.popen = spawned([sys.executable, *argv], stderr=subprocess.PIPE, env=environment)
        self.errors = []
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self):
        for line in self.popen.stderr:
            self.errors.append(line)

    def end(self):
        """Return exit code, standard output and standard error; can be asked once."""
        try:
            code = self.popen.wait(DEADLINE_S)
        finally:
            self.kill()
            self._reading.join(DEADLINE_S)
        with self.popen.stdout, self.popen.stderr:
            return code, self.popen.stdout.read(), "".join(self.errors)

    def kill(self):
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def processes():
    """Yield a starter; whatever happens, no process is left behind."""
    started = []

    def start(*argv, **variables):
        started.append(Process(*argv, **variables))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            with contextlib.suppress(ValueError):  # it has been read already
                process.end()


def barrier(start, head, member, *words):
    variables = {TASK_SOCKET_VARIABLE: head.paths[member]}
    return start("-c", COMMAND, "barrier", *words, **variables)


def throw_garbage(path):
    for data in GARBAGE:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(path)
            with contextlib.suppress(OSError):
                stranger.sendall(data)


def assert_all_passed(*ended):
    for code, out, err in ended:
        assert (code, err) == (0, "")
        assert out.startswith("barrier `default`: all have reached it after ")
        assert out.count("\n") == 1


def test_tasks_wait_until_the_last_has_come_and_garbage_changes_nothing():
    with FakeHead(("a", "b", "c")) as head, processes() as start:
        first = [barrier(start, head, "a"), barrier(start, head, "b")]
        wait_until(lambda: head.num_waiting == 2)
        for path in head.paths.values():
            throw_garbage(path)
        assert [process.popen.poll() for process in first] == [None, None]
        last = barrier(start, head, "c")

        assert_all_passed(*[process.end() for process in (*first, last)])


def test_a_killed_member_is_missing_until_its_successor_comes():
    with FakeHead(("a", "b")) as head, processes() as start:
        killed = barrier(start, head, "a")
        wait_until(lambda: head.num_waiting == 1)
        killed.kill()
        wait_until(lambda: head.num_waiting == 0)
        second = barrier(start, head, "b")
        wait_until(lambda: head.num_waiting == 1)
        successor = barrier(start, head, "a")

        assert_all_passed(second.end(), successor.end())
        assert killed.end()[0] == -signal.SIGKILL


ROUNDS = """
import os, torchmuster
for number in range(100):
    open(f"{os.environ['PLACE']}/{os.environ['NAME']}-{number}", "w").close()
    torchmuster.barrier("step", timeout_s=60.0)
    here = sum(os.path.exists(f"{os.environ['PLACE']}/{name}-{number}") for name in "abc")
    assert here == 3, (number, here)
"""


def test_a_hundred_rounds_of_three_processes_keep_in_step(tmp_path):
    with FakeHead(("a", "b", "c")) as head, processes() as start:
        loops = [
            start("-c", ROUNDS, PLACE=str(tmp_path), NAME=member, **{TASK_SOCKET_VARIABLE: path})
            for member, path in head.paths.items()
        ]

        assert [process.end() for process in loops] == [(0, "", "")] * 3
    assert len(os.listdir(tmp_path)) == 300


def test_the_call_of_the_seed_waits_in_the_group_and_says_what_is_not_used():
    words = ("--num_nodes", "2", "--connect", "some-host")
    with FakeHead(("a", "b")) as head, processes() as start:
        both = [
            barrier(start, head, member, *words, "--rank", str(rank))
            for rank, member in enumerate(head.members)
        ]
        ended = [process.end() for process in both]

    note = "note: in a task of a workflow its agent is asked, --connect not used\n"
    assert [(code, err) for code, _, err in ended] == [(0, note)] * 2


def test_at_the_limit_it_leaves_with_6_and_names_the_missing_task():
    with FakeHead(("a", "b", "c")) as head, processes() as start:
        code, out, err = barrier(start, head, "a", "--timeout", "100ms").end()

    assert (code, out) == (6, "")
    assert err.startswith("error: the barrier `default` was not full within 0.1 s: missing b, c\n")


TASK_ENDED = [
    "error: the barrier `default` can never be full: task `b` has ended\n",
    "because: b: exit code 3",
]


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        (lambda head: head.end_member("b", "exit code 3"), 12, TASK_ENDED),
        (lambda head: head.lose_agent("a"), 5, ["error: the agent of this task has ended\n"]),
    ],
    ids=["when a task ends", "when the agent is lost"],
)
def test_it_leaves_at_once_and_says_why(end, code, told):
    with FakeHead(("a", "b")) as head, processes() as start:
        waiting = barrier(start, head, "a")
        wait_until(lambda: head.num_waiting == 1)
        end(head)
        found, _, err = waiting.end()

    assert found == code
    assert err.startswith(told[0])
    assert told[-1] in err


@pytest.mark.parametrize(
    "words", [(), ("--num-nodes", "2", "--rank", "0", "--connect", "h", "--secret-file", "key")]
)
def test_outside_of_a_workflow_it_says_what_to_use(words):
    with processes() as start:
        code, _, err = start("-c", COMMAND, "barrier", *words).end()

    assert code == 2
    assert err.count("error: ") == 1
    assert "not part of a workflow" in err
    for way in ("torch.distributed.barrier()", "tasks of one group", "muster submit"):
        assert way in err


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        (
            ("--num-nodes", "0", "--rank", "x", "--timeout", "soon"),
            ["`0` is not a number", "`x` is not a number", "not a time above 0"],
        ),
        (("--num-nodes", "2", "--rank", "0", "--count", "3"), ["are the same thing, and differ"]),
    ],
)
def test_mistakes_are_told_together_and_nothing_starts(words, sentences):
    with FakeHead(("a", "b")) as head, processes() as start:
        code, _, err = barrier(start, head, "a", *words).end()

    assert code == 2
    assert err.count("error: ") == len(sentences)
    for sentence in sentences:
        assert sentence in err


@pytest.mark.slow
def test_a_task_that_is_ten_seconds_late_is_waited_for_and_named():
    with FakeHead(("a", "b", "c")) as head, processes() as start:
        first = [barrier(start, head, "a"), barrier(start, head, "b")]
        wait_until(lambda: len(first[0].errors) == len(first[1].errors) == 2)
        last = barrier(start, head, "c")
        ended = [process.end() for process in first]

        assert last.end()[0] == 0
    for code, _, err in ended:
        assert code == 0
        assert err.count("barrier `default`: 2 of 3 are here, missing: c; 59") == 2
