"""Commands inside of a task: limits and windows, beside a process of the test in place of the task's command."""

import asyncio
import contextlib
import os
import subprocess
import sys

import pytest

from kit.programs import shell_program
from kit.waiting import wait_until_async
from torchmuster.core import proc
from torchmuster.launcher.net import part_messages
from torchmuster.launcher.node.exec import KILLED, Execs, entry_argv
from torchmuster.launcher.node.exec_launch import find_shell
from torchmuster.launcher.node.namespaces import NOT_FOUND, VIEW_FAILED, LaunchError

LIMIT_S = 90.0


class Target:
    """A command of a task that has begun: a process of the test."""

    worker_ticks = None
    environment = None

    def __init__(self, pid, has_begun=True):
        self.pid, self.has_begun = pid, lambda: has_begun

    def poll(self):
        return None


@pytest.fixture
def target():
    with subprocess.Popen(["sleep", "60"]) as child:
        yield Target(child.pid)
        child.kill()


class Stage:
    """The commands of one task, and what they said."""

    def __init__(self):
        self.sent = []
        self.execs = Execs("t", self.sent.append)

    def start(self, target, *argv, exec_id="1", **fields):
        start = part_messages.ExecStart(exec_id=exec_id, task="t", argv=argv, **fields)
        self.execs.take(start, target)

    def say(self, message):
        self.execs.take(message, None)

    def of(self, kind):
        return [message for message in self.sent if isinstance(message, kind)]

    def output(self):
        return b"".join(m.data for m in self.of(part_messages.ExecOutput))

    def num_taken(self):
        return sum(taken.size_bytes for taken in self.of(part_messages.ExecAcknowledged))

    async def until(self, condition):
        return await wait_until_async(condition, limit_s=LIMIT_S)

    async def end(self):
        ends = part_messages.ExecEnded | part_messages.ExecRefused
        return (await self.until(lambda: self.of(ends)))[0]


@contextlib.asynccontextmanager
async def staged():
    """Give a stage that leaves no process."""
    stage = Stage()
    try:
        yield stage
    finally:
        stage.execs.end_all("the test is over")


def data(exec_id, content, *, end=False):
    return part_messages.ExecInput(exec_id=exec_id, data=content, end=end)


async def test_nothing_is_started_while_the_task_runs_no_command():
    async with staged() as stage:
        stage.start(None, "true")
        assert (await stage.end()).what == "the task t runs no command now"


async def test_one_more_than_the_limit_is_refused():
    async with staged() as stage:
        for number in range(part_messages.MAX_EXECS + 1):
            stage.start(Target(1, has_begun=False), "true", exec_id=str(number))
        refused = stage.of(part_messages.ExecRefused)
        assert [one.exec_id for one in refused] == [str(part_messages.MAX_EXECS)]
        assert "16 commands" in refused[0].what


async def test_input_comes_back_and_its_end_ends_the_command(target):
    async with staged() as stage:
        stage.start(target, "cat")
        stage.say(data("1", b"typed\0early", end=True))
        end = await stage.end()
        assert (end.code, end.why) == (0, None)
        assert stage.output() == b"typed\0early"
        assert stage.num_taken() == 11


async def test_no_more_than_a_window_is_sent_until_it_was_taken(target):
    async with staged() as stage:
        window = part_messages.EXEC_WINDOW_BYTES
        stage.start(target, "head", "-c", str(window + 5), "/dev/zero")
        await stage.until(lambda: len(stage.output()) >= window)
        await asyncio.sleep(0.5)  # longer than the silence after which a command's end is told
        assert len(stage.output()) == window
        assert stage.of(part_messages.ExecEnded) == []
        stage.say(part_messages.ExecAcknowledged(exec_id="1", size_bytes=window))
        assert (await stage.end()).code == 0
        assert len(stage.output()) == window + 5


async def test_what_a_busy_loop_has_not_read_is_sent_before_the_end(target, monkeypatch):
    async with staged() as stage:
        stage.start(target, "printf", "12345678", window_bytes=4)
        await stage.until(lambda: stage.output() == b"1234")
        (pid,) = stage.execs.pids
        await stage.until(lambda: proc.read_process(pid) is None)  # the rest is in its pipe
        monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", lambda *_: None)  # busy
        stage.say(part_messages.ExecAcknowledged(exec_id="1", size_bytes=4))
        await stage.until(lambda: len(stage.output()) == 8 or stage.of(part_messages.ExecEnded))
        stage.say(part_messages.ExecAcknowledged(exec_id="1", size_bytes=4))
        assert (await stage.end()).code == 0
        assert stage.output() == b"12345678"


async def test_a_client_that_sends_more_than_its_window_loses_the_command(target):
    async with staged() as stage:
        stage.start(target, "sleep", "60")
        (pid,) = await stage.until(lambda: stage.execs.pids)
        for _ in range(6):  # a pipe takes one chunk, the window four
            stage.say(data("1", bytes(part_messages.EXEC_CHUNK_BYTES)))
        await stage.until(lambda: not os.path.exists(f"/proc/{pid}"))
        assert stage.of(part_messages.ExecEnded) == []


async def test_input_that_nobody_reads_any_more_counts_as_taken(target):
    async with staged() as stage:
        stage.start(target, "sh", "-c", "exec <&-; echo closed; sleep 60")
        await stage.until(lambda: stage.output() == b"closed\n")
        stage.say(data("1", b"lost"))
        stage.say(data("1", b"too"))
        await stage.until(lambda: stage.num_taken() == 7)


async def test_the_end_of_the_task_kills_and_says_why(target):
    async with staged() as stage:
        stage.start(target, "sleep", "60")
        (pid,) = await stage.until(lambda: stage.execs.pids)
        stage.execs.end_all("the task has ended")
        end = await stage.end()
        assert (end.code, end.why) == (KILLED, "the task has ended")
        assert proc.read_process(pid) is None


async def test_words_that_can_t_be_a_command_line_are_refused(target):
    async with staged() as stage:
        stage.start(target, "a\0b")
        end = await stage.end()
        assert end.what == "the command can't be started"
        assert "null byte" in end.why


def test_the_launcher_gets_the_command_s_words_as_they_are():
    start = part_messages.ExecStart(
        exec_id="1", task="t", argv=("--pid", "--"), tty=True, term="xterm"
    )
    words = entry_argv(start, 7)
    assert words[:3] == [sys.executable, "-I", "-S"]
    assert words[4:] == ["exec", "--pid=7", "--tty", "--term=xterm", "--", "--pid", "--"]


async def test_those_that_are_left_before_they_begin_hold_no_places():
    async with staged() as stage:
        for number in range(part_messages.MAX_EXECS * 2):
            stage.start(Target(1, has_begun=False), "true", exec_id=str(number))
            if number % 2:
                await asyncio.sleep(0)
            stage.say(part_messages.ExecLeave(exec_id=str(number)))
            await asyncio.sleep(0.01)
        assert not stage.of(part_messages.ExecRefused)


# The launcher of `muster exec`: what it takes over from a process, and what it says when it can't.


@pytest.fixture
def sibling(tmp_path):
    """Return a process with a folder and variables of its own."""
    environment = {"PATH": os.environ["PATH"], "COLOUR": "light blue"}
    pipe = subprocess.PIPE
    with subprocess.Popen(["cat"], cwd=tmp_path, env=environment, stdin=pipe, stdout=pipe) as child:
        child.stdin.write(b"running\n")
        child.stdin.flush()
        # Popen returns when the kernel has closed the old program's files: variables come a moment later
        assert child.stdout.readline() == b"running\n"
        yield child.pid
        child.kill()


def launch(pid, *words):
    argv = proc.node_program("exec", f"--pid={pid}", "--", *words)
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, input="echo shell\n")


def test_folder_and_variables_of_the_process_are_taken_over(sibling, tmp_path):
    ended = launch(sibling, "sh", "-c", 'pwd; echo "$COLOUR"; exit 4')
    assert (ended.returncode, ended.stdout) == (4, f"{tmp_path}\nlight blue\n"), ended.stderr


def test_without_words_a_shell_is_started(sibling):
    assert launch(sibling).stdout == "shell\n"


def test_words_like_our_own_options_belong_to_the_command(sibling):
    assert launch(sibling, "echo", "--pid", "--", "-h").stdout == "--pid -- -h\n"


@pytest.mark.parametrize("pid", [1, 2**22 + 1])
def test_a_process_that_is_not_our_sibling_is_not_entered(pid):
    ended = launch(pid, "true")
    assert ended.returncode == VIEW_FAILED
    assert ended.stderr.startswith("muster: the task's process ")


def test_a_missing_command_is_code_127(sibling):
    ended = launch(sibling, "no-such-command")
    assert (ended.returncode, "was not found" in ended.stderr) == (127, True)


def test_bash_comes_before_sh(tmp_path):
    for name in ("sh", "bash"):
        path = shell_program(tmp_path / name, "")
        assert find_shell(str(tmp_path)) == str(path)


def test_a_task_without_a_shell_has_to_be_given_a_command(tmp_path):
    with pytest.raises(LaunchError, match="name a command") as caught:
        find_shell(str(tmp_path))
    assert caught.value.code == NOT_FOUND
