"""`muster exec` with real processes: its view, its streams, its terminal, and every way in which it ends."""

import contextlib
import fcntl
import json
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import termios
import time
from pathlib import Path

import pytest
from tests.workflows.conftest import Workflow, read

from kit.command import SOURCE
from kit.waiting import wait_until
from torchmuster.workflow.sandbox.place import namespaces_available

LIMIT_S = 180.0
NOBODY = 65534
TASKS = """
workflow:
  name: two
  groups:
  - name: g
    ignoreNonleadStatus: false
    tasks:
    - name: t
      lead: true
      command: [bash, -c, 'cd {{output}}; touch FOLDER/began-t; until [ -e FOLDER/end ]; do sleep 0.05; done']
      environment: {COLOUR: 'light blue'}
      files:
      - {path: /tmp/run.sh, contents: 'echo private'}
    - name: u
      command: [bash, -c, 'touch FOLDER/began-u; until [ -e FOLDER/end ]; do sleep 0.05; done']
  - name: later
    tasks:
    - {name: after, command: ['true'], inputs: [{task: t}]}
"""


class Run:
    """A workflow that runs, and `muster exec` in it."""

    def __init__(self, workflow, python, user):
        self.workflow = workflow
        self.python = python
        self.folder = workflow.folder
        self.user = user

    def popen(self, *words, stdin=subprocess.DEVNULL, **options):
        argv = [self.python, "-m", "torchmuster", "exec", "r", *words]
        where = {"env": _environment(MUSTER_HOME=str(self.workflow.home)), "cwd": self.folder}
        streams = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(argv, **{**streams, **where, **self.user, **options})

    def exec(self, *words, given=b""):
        with self.popen(*words, stdin=subprocess.PIPE) as child:
            try:
                out, err = child.communicate(given, timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                raise
        return child.returncode, out, err.decode()

    def end(self):
        (self.folder / "end").touch()

    def has_process(self, *words):
        wanted = [word.encode() for word in words]
        return any(
            read(f"/proc/{pid}/cmdline").split(b"\0")[:-1] == wanted
            for pid in self.workflow.processes()
        )


@pytest.fixture(params=["as_we_are", "as_nobody"])
def run(request, tmp_path):
    """Return a run of TASKS; once as we are and, for root, once without rights."""
    if namespaces_available() is not None:
        pytest.skip(str(namespaces_available()))
    user, folder = {}, tmp_path
    if request.param == "as_nobody":
        if os.geteuid() != 0:
            pytest.skip("only root can become somebody else")
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        folder = Path(tempfile.mkdtemp(prefix="muster-exec-", dir="/tmp"))
        os.chown(folder, NOBODY, NOBODY)
    with _started(folder, user) as found:
        yield found
    if user:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def rooted(tmp_path_factory):
    """Return one run of TASKS for all tests that leave it running."""
    with _started(tmp_path_factory.mktemp("exec"), {}) as found:
        yield found


@pytest.fixture
def fresh(tmp_path):
    """Return a run of TASKS that the test may end."""
    with _started(tmp_path, {}, "--grace", "3600s") as found:
        yield found


@contextlib.contextmanager
def _started(folder, user, *options):
    """Yield a run of TASKS, submitted by this user, whose commands have begun; it ends with the block."""
    python = _find_python(user)
    argv = (python, "-m", "torchmuster")
    text = TASKS.replace("FOLDER", str(folder))
    workflow = Workflow(folder, text, options, argv, _variables(), **user)
    try:
        workflow.wait_for_file("began-t")
        workflow.wait_for_file("began-u")
        yield Run(workflow, python, user)
    finally:
        workflow.end()


def _find_python(user):
    """Return an interpreter that this user may start and that has what `muster submit` needs."""
    if not user:
        return sys.executable
    code = "import click, yaml, pydantic, jinja2, torchmuster"
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        words, silent = [python, "-c", code], {"stderr": subprocess.DEVNULL}
        with contextlib.suppress(OSError):
            if subprocess.run(words, env=_environment(), cwd="/", **silent, **user).returncode == 0:
                return python
    pytest.skip("no interpreter that this user can start")


def _variables():
    """Return those by which another interpreter of the same version finds our packages too."""
    path = os.pathsep.join([str(SOURCE), sysconfig.get_path("purelib")])
    return {"PYTHONPATH": path, "TERM": "xterm"}


def _environment(**variables):
    return {**os.environ, **_variables(), **variables}


# The view.


def test_a_command_sees_what_its_task_sees(run):
    script = 'bash /tmp/run.sh; echo "$COLOUR"; pwd; readlink /proc/self/ns/user /proc/self/ns/mnt'
    code, out, err = run.exec("t", "--", "sh", "-c", script)
    lines = out.decode().splitlines()
    assert code == 0, err
    assert lines[:2] == ["private", "light blue"]
    assert lines[2].endswith("/tasks/t/place-0/output")
    task = run.workflow.pid("began-t")
    assert lines[3:] == [os.readlink(f"/proc/{task}/ns/{name}") for name in ("user", "mnt")]


def test_another_task_s_files_are_not_there(run):
    code, _, err = run.exec("u", "--", "cat", "/tmp/run.sh")
    assert code == 1
    assert "No such file" in err


def test_a_command_is_in_its_task_s_private_network(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("a private network wants root on some kernels")
    with _started(tmp_path, {}, "--task-network", "private") as private:
        script = "readlink /proc/self/ns/net; grep -c -w u /etc/hosts"
        code, out, err = private.exec("t", "--", "sh", "-c", script)
        task = private.workflow.pid("began-t")
        assert code == 0, err
        space, num_lines = out.decode().split()
        assert space == os.readlink(f"/proc/{task}/ns/net") != os.readlink("/proc/self/ns/net")
        assert int(num_lines) > 0


# Streams and codes.


@pytest.mark.short
def test_both_streams_and_the_exit_code_arrive(run):
    code, out, err = run.exec("t", "--", "sh", "-c", "echo one; echo two >&2; exit 7")
    assert (code, out, err) == (7, b"one\n", "two\n")


def test_megabytes_of_bytes_pass_through_cat_unchanged(run):
    data = os.urandom(5_000_000)
    code, out, err = run.exec("t", "--", "cat", given=data)
    assert code == 0, err
    assert out == data


def test_a_signal_s_end_is_told_as_a_shell_tells_it(rooted):
    assert rooted.exec("t", "--", "sh", "-c", "kill -9 $$")[0] == 128 + 9


def test_a_missing_command_is_told_with_a_near_miss(rooted):
    code, _, err = rooted.exec("t", "--", "sleeep", "1")
    assert code == 127
    assert "did you mean `sleep`?" in err


def test_a_shell_is_started_when_no_command_is_named(rooted):
    assert rooted.exec("t", given=b"echo $((6 * 7))\n")[:2] == (0, b"42\n")


def test_what_a_command_leaves_behind_does_not_keep_the_client(rooted):
    code, out, _ = rooted.exec("t", "--", "sh", "-c", "sleep 3641.5 & echo gone")
    assert (code, out) == (0, b"gone\n")
    assert rooted.has_process("sleep", "3641.5")


def test_a_client_that_does_not_read_stops_the_writer(rooted):
    script = "head -c 3000000 /dev/zero; touch written; sleep 60"
    with rooted.popen("t", "--", "sh", "-c", script) as child:
        output = rooted.workflow.run_dir / "tasks" / "t" / "place-0" / "output"
        assert child.stdout.read(1) == b"\0"
        # A writer that does not stop has written in a moment; that it never does can't be waited for.
        with contextlib.suppress(AssertionError):
            wait_until((output / "written").exists, "too early an end of writing", 1.0)
        assert not (output / "written").exists()
        left = 2_999_999
        while left:
            left -= len(child.stdout.read(min(left, 65536)))
        wait_until((output / "written").exists, "the end of writing")
        child.kill()


def test_two_commands_run_at_once(rooted):
    with rooted.popen("t", "--", "cat", stdin=subprocess.PIPE) as first:
        first.stdin.write(b"a")
        first.stdin.flush()
        assert first.stdout.read(1) == b"a"
        assert rooted.exec("t", "--", "echo", "second")[:2] == (0, b"second\n")
        first.stdin.write(b"b")
        first.stdin.close()
        assert first.stdout.read() == b"b"
        assert first.wait(LIMIT_S) == 0


def test_a_group_gets_the_command_in_every_task(rooted):
    script = "echo $MUSTER_TASK; [ -e /tmp/run.sh ] && exit 3; exit 0"
    code, out, err = rooted.exec("--group", "g", "--", "sh", "-c", script)
    assert code == 3, err
    assert sorted(line.split(" ")[0] for line in out.decode().splitlines()) == ["[t]", "[u]"]


# Ends.


def test_a_killed_client_takes_its_command_with_it(run):
    with run.popen("t", "--", "sleep", "3643.5") as child:
        wait_until(lambda: run.has_process("sleep", "3643.5"), "the command")
        child.kill()
    wait_until(lambda: not run.has_process("sleep", "3643.5"), "the end of the command")


def test_a_command_that_ignores_the_hangup_is_killed(rooted):
    script = "trap '' HUP; sleep 3644.5; sleep 3645.5"
    with rooted.popen("t", "--", "sh", "-c", script) as child:
        wait_until(lambda: rooted.has_process("sleep", "3644.5"), "the command")
        child.kill()
    wait_until(lambda: not rooted.has_process("sh", "-c", script), "its end")
    assert not rooted.has_process("sleep", "3645.5")


def test_a_command_ends_with_its_task(run):
    with run.popen("t", "--", "sh", "-c", "echo on; exec sleep 3646.5") as child:
        assert child.stdout.readline() == b"on\n"
        run.end()
        assert child.wait(LIMIT_S) == 137
        assert b"the command of the task has ended" in child.stderr.read()
    assert run.workflow.wait() == 0, run.workflow.out
    assert not run.has_process("sleep", "3646.5")


def test_a_client_hears_that_its_task_was_lost(fresh):
    with fresh.popen("t", "--", "sleep", "3651.5") as child:
        wait_until(lambda: fresh.has_process("sleep", "3651.5"), "the command")
        agent = fresh.workflow.pid("--task=t")
        os.kill(agent, signal.SIGKILL)
        assert child.wait(LIMIT_S) == 137
        assert b"muster: task t: its agent has gone" in child.stderr.read()
    wait_until(lambda: not fresh.has_process("sleep", "3651.5"), "the end of the command")


def test_a_command_does_not_delay_a_graceful_stop(fresh):  # whose grace is an hour
    with fresh.popen("t", "--", "sh", "-c", "trap '' TERM; sleep 3647.5") as child:
        wait_until(lambda: fresh.has_process("sleep", "3647.5"), "the command")
        fresh.workflow.process.send_signal(signal.SIGTERM)
        fresh.workflow.wait()
        assert child.wait(LIMIT_S) == 137


def test_a_command_that_takes_too_long_is_ended_at_the_limit(rooted):
    code, _, err = rooted.exec("t", "--timeout", "1s", "--", "sleep", "3648.5")
    assert code == 124
    assert "longer than --timeout of 1 s" in err
    wait_until(lambda: not rooted.has_process("sleep", "3648.5"), "the end of the command")


def test_ctrl_c_without_a_terminal_reaches_the_command(rooted):
    script = "trap 'echo caught; exit 9' INT; echo on; while :; do sleep 0.05; done"
    with rooted.popen("t", "--", "bash", "-c", script) as child:
        assert child.stdout.readline() == b"on\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.read() == b"caught\n"
        assert child.wait(LIMIT_S) == 9


# A terminal.


class Terminal:
    """A terminal with `muster exec` on it."""

    def __init__(self, run, *words):
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 33, 101, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        self.child = run.popen(*words, **streams, start_new_session=True)
        self.seen = b""

    def type(self, text):
        os.write(self.ours, text)

    def expect(self, text):
        """Read until this text was shown; drop everything up to its end."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.seen:
            left = deadline - time.monotonic()
            ready = select.select([self.ours], [], [], max(0.0, left))[0]
            assert ready, f"{text!r} was not shown: {self.seen!r}"
            self.seen += os.read(self.ours, 65536)
        _, _, self.seen = self.seen.partition(text)

    def close(self):
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait(LIMIT_S)
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def terminal_of():
    """Return a function that opens a terminal with `muster exec` on it."""
    with contextlib.ExitStack() as opened:
        yield lambda *given: opened.enter_context(contextlib.closing(Terminal(*given)))


def test_a_shell_on_a_terminal_behaves_like_one_at_home(run, terminal_of):
    terminal = terminal_of(run, "t", "--", "bash", "--norc")
    terminal.type(b"PS1='at''home> '\n")
    terminal.expect(b"athome> ")
    terminal.type(b"tty; stty size; echo $TERM\n")
    terminal.expect(b"/dev/pts/")
    terminal.expect(b"33 101\r\nxterm\r\n")
    terminal.type(b"sleep 3649.5\n")
    wait_until(lambda: run.has_process("sleep", "3649.5"), "the command")
    terminal.type(b"\x03")
    terminal.expect(b"^C")
    wait_until(lambda: not run.has_process("sleep", "3649.5"), "the end of the command")
    terminal.type(b"exit 5\n")
    terminal.expect(b"exit")
    assert terminal.child.wait(LIMIT_S) == 5
    assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_a_new_size_of_the_terminal_reaches_the_shell(rooted, terminal_of):
    script = "trap 'stty size' WINCH; echo ready; while :; do sleep 0.05; done"
    terminal = terminal_of(rooted, "t", "--", "bash", "-c", script)
    terminal.expect(b"ready")
    fcntl.ioctl(terminal.theirs, termios.TIOCSWINSZ, struct.pack("4H", 44, 122, 0, 0))
    terminal.child.send_signal(signal.SIGWINCH)
    terminal.expect(b"44 122")


def test_a_terminal_is_put_back_when_the_client_is_told_to_end(rooted, terminal_of):
    terminal = terminal_of(rooted, "t", "--", "sh", "-c", "echo on; sleep 3650.5")
    terminal.expect(b"on\r\n")
    assert termios.tcgetattr(terminal.theirs) != terminal.before
    terminal.child.send_signal(signal.SIGTERM)
    assert terminal.child.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert termios.tcgetattr(terminal.theirs) == terminal.before
    wait_until(lambda: not rooted.has_process("sleep", "3650.5"), "the end of the command")


# Mistakes.


def test_mistakes_are_told_with_a_way_on(rooted):
    told = {
        ("tt", "--", "true"): (4, "did you mean `t`?"),
        ("--group", "gg", "--", "true"): (4, "did you mean `g`?"),
        ("after", "--", "true"): (2, "the task after does not run yet"),
        ("--", "true"): (2, "needs a task"),
        ("t", "x", "--", "true"): (2, "`x` comes before `--`"),
        ("--group", "g"): (2, "--group needs a command"),
        ("t", "--timeout", "soon", "--", "true"): (2, "not a time above 0"),
    }
    for words, (code, text) in told.items():
        found, _, err = rooted.exec(*words)
        assert (found, text in err) == (code, True), err


def test_a_run_that_has_ended_says_so(fresh):
    fresh.end()
    assert fresh.workflow.wait() == 0, fresh.workflow.out
    code, _, err = fresh.exec("t", "--", "true")
    assert code == 2
    assert "the run r has ended: it is succeeded" in err
    assert json.loads((fresh.workflow.run_dir / "result.json").read_text())["state"] == "COMPLETED"
