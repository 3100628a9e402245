import os
import signal
import subprocess
import sys

import pytest

from kit.command import ran
from kit.waiting import wait_until
from torchmuster.core import proc
from torchmuster.errors import MusterError

DEADLINE_S = 30.0
GONE_PID = 2**22 + 1  # beyond the kernel's largest


@pytest.fixture
def sleeper():
    """A process in a session of its own, with a child."""
    child = proc.start(["sh", "-c", "sleep 600 & sleep 600; :"])
    wait_until(lambda: len(proc.children_of(child.pid)) == 2)
    yield child
    proc.kill_session(child.pid)
    child.wait(DEADLINE_S)


def test_a_command_is_started_in_a_session_of_its_own(sleeper):
    facts = proc.read_process(sleeper.pid)

    assert (facts.session, facts.parent_pid) == (sleeper.pid, os.getpid())
    assert sleeper.poll() is None
    assert sleeper.wait(0.01) is None


def test_the_status_of_a_command_is_its_exit_code_or_its_signal():
    assert proc.start(["sh", "-c", "exit 7"]).wait(DEADLINE_S) == 7
    assert proc.start(["sh", "-c", "kill -9 $$"]).wait(DEADLINE_S) == -9


def test_a_command_reads_nothing_from_our_terminal():
    assert proc.start(["sh", "-c", 'test -z "$(cat)"']).wait(DEADLINE_S) == 0


def test_a_command_that_does_not_exist_is_an_error_with_its_name():
    with pytest.raises(MusterError, match="`/no/such` can't be started") as caught:
        proc.start(["/no/such", "x"])
    assert caught.value.where == "/no/such x"


def test_the_killing_of_a_session_takes_the_children_too(sleeper):
    below = proc.descendants(sleeper.pid)

    proc.kill_session(sleeper.pid)

    assert sleeper.wait(DEADLINE_S) == -signal.SIGKILL
    assert len(below) == 2
    wait_until(lambda: not any(proc.is_running(pid) for pid in below))


def test_a_name_with_parentheses_does_not_confuse_the_facts(tmp_path):
    path = tmp_path / "a) R 1 (b"
    path.symlink_to("/bin/sleep")
    child = proc.start([str(path), "600"])
    wait_until(lambda: os.readlink(f"/proc/{child.pid}/exe") != os.readlink("/proc/self/exe"))

    assert proc.read_process(child.pid).parent_pid == os.getpid()
    child.send_signal(9)
    child.wait(DEADLINE_S)


def test_a_zombie_exists_but_does_not_run():
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as process:
        process.stdout.read()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

        assert proc.read_process(process.pid).state == "Z"
        assert not proc.is_running(process.pid)


def test_what_has_gone_has_no_facts():
    assert proc.read_process(GONE_PID) is None
    assert not proc.is_running(GONE_PID)
    assert proc.children_of(GONE_PID) == []
    proc.kill_quietly(GONE_PID)
    proc.kill_session(GONE_PID)


def test_a_process_that_catches_a_signal_is_known():
    def catches(signum):
        return proc.catches_signal(os.getpid(), signum)

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert catches(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not catches(signal.SIGUSR1)
    assert not proc.catches_signal(GONE_PID, signal.SIGUSR1)


def test_the_boot_is_named_the_same_each_time():
    assert proc.boot_id() == proc.boot_id() != ""


DIE_WITH_PARENT = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from torchmuster.core import proc
parent = os.getpid()
child = os.fork()
if child == 0:
    proc.die_with_parent(parent)
    os.write(1, b"%d" % os.getpid())
while True:
    signal.pause()
"""


def test_a_child_that_asked_for_it_dies_with_its_parent():
    source = os.path.dirname(proc.PACKAGE_FOLDER)
    with subprocess.Popen(
        [sys.executable, "-IS", "-c", DIE_WITH_PARENT, source], stdout=subprocess.PIPE
    ) as parent:
        child = int(os.read(parent.stdout.fileno(), 20))
        assert proc.is_running(child)
        parent.send_signal(signal.SIGKILL)
        parent.wait(DEADLINE_S)
        wait_until(lambda: not proc.is_running(child))


END_CHILDREN = """
import os, subprocess, sys
sys.path.insert(0, sys.argv[1])
from torchmuster.core import proc
proc.become_subreaper()
# A grandchild in a session of its own, whose parent leaves at once: it becomes ours.
subprocess.run(["sh", "-c", "setsid sleep 600 & setsid sh -c 'sleep 600 & sleep 600' &"])
kept = subprocess.Popen(["sleep", "600"])
while proc.end_children(frozenset({kept.pid})):
    os.sched_yield()
assert proc.children_of(os.getpid()) == [kept.pid], proc.children_of(os.getpid())
assert kept.poll() is None
kept.kill()
kept.wait()
"""


def test_every_generation_is_ended_but_those_to_be_kept():
    source = os.path.dirname(proc.PACKAGE_FOLDER)
    done = ran([sys.executable, "-IS", "-c", END_CHILDREN, source])

    assert (done.returncode, done.stderr) == (0, "")


def test_a_helper_gets_its_request_and_gives_its_answer():
    code = "import sys; print(sys.stdin.read().upper()); sys.exit(3)"
    done = proc.ask([sys.executable, "-I", "-S", "-c", code], b"hello", timeout_s=30)
    assert (done.status, done.stdout, done.stderr) == (3, b"HELLO\n", b"")


def test_a_helper_that_takes_too_long_is_killed():
    code = "import signal; signal.pause()"
    done = proc.ask([sys.executable, "-I", "-S", "-c", code], b"", timeout_s=0.2)
    assert done.status is None


@pytest.fixture
def in_a_pbs_job(monkeypatch):
    monkeypatch.setenv("PBS_JOBID", "7.ctl")


def test_in_a_job_of_pbs_a_command_stays_in_the_session_and_leads_a_group(in_a_pbs_job):
    child = proc.start(["sh", "-c", "sleep 600 & sleep 600; :"])
    wait_until(lambda: len(proc.children_of(child.pid)) == 2)
    facts, below = proc.read_process(child.pid), proc.descendants(child.pid)
    proc.kill_session(child.pid)

    assert (facts.session, facts.group) == (os.getsid(0), child.pid)
    assert child.wait(DEADLINE_S) == -signal.SIGKILL
    wait_until(lambda: not any(proc.is_running(pid) for pid in below))


def test_in_a_job_of_pbs_only_the_leader_of_a_terminal_leaves_the_session(in_a_pbs_job):
    child = proc.start(["sleep", "600"], takes_terminal=True)
    facts = proc.read_process(child.pid)
    proc.kill_session(child.pid)
    child.wait(DEADLINE_S)

    assert facts.session == child.pid


def test_a_fork_in_a_job_of_pbs_leads_a_group_and_no_session(in_a_pbs_job):
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        proc.detach_from_parent()
        os.write(write_fd, f"{os.getsid(0)} {os.getpgid(0)}".encode())
        os._exit(0)
    os.waitpid(pid, 0)

    assert os.read(read_fd, 64).decode() == f"{os.getsid(0)} {pid}"


def test_who_started_a_process_is_known_by_its_session_or_its_group():
    facts = proc.ProcessFacts(pid=9, parent_pid=1, group=8, session=7, state="S", start_ticks=0)

    assert proc.leader_of(facts, {8}) == 8
    assert proc.leader_of(facts, {7, 8}) == 7
    assert proc.leader_of(facts, {6}) is None
