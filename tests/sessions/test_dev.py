"""`muster dev`: what was saved runs at once, on a session of its own."""

import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess

import pytest

from kit.command import MUSTER
from kit.screen import TerminalOf
from kit.waiting import wait_until
from torchmuster.core import proc

LIMIT_S = 120.0
WAITS = "waiting for a change"
ENDLESS = """\
import os, pathlib, time
import model
print("begun", flush=True)
pathlib.Path("pid").write_text(str(os.getpid()))
pathlib.Path("begun").touch()
while True:
    time.sleep(1)
"""


class Dev:
    """The command with its standard input as a pipe, and what it has said."""

    def __init__(self, place, *words, log="first"):
        self.out, self.err = place.folder / f"{log}.out", place.folder / f"{log}.err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            where = {"cwd": place.project, "env": place.env, "stdout": out, "stderr": err}
            argv = [*MUSTER, "dev", *words, "train.py"]
            self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, **where)

    def __enter__(self):
        return self

    def __exit__(self, *reason):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()

    def wait_for_status(self, number):
        """Wait until so many runs have ended and a change is waited for; return the last line."""
        wait_until(
            lambda: self.err.read_text().count(WAITS) >= number or self.process.poll() is not None,
            f"status {number}",
            LIMIT_S,
        )
        return [line for line in self.err.read_text().splitlines() if WAITS in line][-1]

    def wait_for_success(self, number):
        """Wait for the status of a run that has succeeded; what was printed is told where it has not."""
        line = self.wait_for_status(number)
        assert "failed in" not in line, self.err.read_text() + self.out.read_text()
        return line

    def type(self, text):
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def leave(self):
        """Type `q`, and return the exit code."""
        self.type("q")
        return self.process.wait(LIMIT_S)


@pytest.fixture
def on_terminal(place, monkeypatch):
    """Return a function that starts a command in the project on a terminal."""
    monkeypatch.chdir(place.project)
    return lambda *argv: TerminalOf(argv, {**place.env, "TERM": "xterm", "PS1": "shell> "})


def states(place):
    """Return how each run of the script has ended, the oldest first."""
    found = (path.parent for path in (place.home / "runs").glob("*-train-*/plan.json"))
    folders = sorted(found, key=lambda folder: (folder / "plan.json").stat().st_mtime_ns)
    results = [folder / "result.json" for folder in folders]
    return [json.loads(one.read_text())["state"] if one.exists() else "open" for one in results]


def living_session(place):
    return [one["name"] for one in place.listed()]


def test_a_saved_module_runs_again_with_the_new_code_and_the_session_ends_with_the_command(place):
    with Dev(place, "--nodes", "2", "--nproc-per-node", "2") as dev:
        assert dev.wait_for_success(1).startswith("muster: ran ")
        assert living_session(place) == ["dev-project"]
        place.write("model.py", "ANSWER = 1\n")
        assert dev.wait_for_success(2).startswith("muster: saved model.py ")
        place.write("train.py", "import model\nprint('new', model.ANSWER, flush=True)\n")
        dev.wait_for_success(3)
        dev.type("r")
        dev.wait_for_success(4)
        assert dev.leave() == 0

    said = dev.out.read_text()
    assert said == "answer 0 of 4\nanswer 1 of 4\nnew 1\nnew 1\n"
    assert living_session(place) == []
    assert states(place) == ["succeeded"] * 4


def test_a_save_during_a_run_ends_it_at_once_and_starts_the_new_code(place):
    with endless_run(place) as dev:
        place.write("train.py", "print('after', flush=True)\n")
        assert dev.wait_for_status(1).startswith("muster: saved train.py ")
        assert dev.leave() == 0

    assert dev.out.read_text() == "begun\nafter\n"
    assert states(place) == ["cancelled", "succeeded"]
    assert "error:" not in dev.err.read_text()


def test_a_failure_shows_why_and_the_exit_code_is_the_last_run_s(place):
    place.write("train.py", "raise ValueError('no such batch')\n")
    with Dev(place) as dev:
        assert "failed in" in dev.wait_for_status(1)
        assert dev.leave() == 1

    said = dev.err.read_text()
    assert "error: rank 0 raised ValueError: no such batch" in said
    assert states(place) == ["failed"]  # without a restart


def test_until_error_runs_again_and_again_without_a_save(place):
    place.write(
        "train.py",
        "import pathlib\n"
        "count = pathlib.Path('count')\n"
        "number = int(count.read_text()) + 1 if count.exists() else 1\n"
        "count.write_text(str(number))\n"
        "assert number < 4\n",
    )
    with Dev(place, "--until-error") as dev:
        assert "failed in" in dev.wait_for_status(1)
        assert states(place) == ["succeeded"] * 3 + ["failed"]
        (place.project / "count").unlink()
        place.write("model.py", "ANSWER = 2\n")
        dev.wait_for_status(2)

    assert states(place)[4:] == ["succeeded"] * 3 + ["failed"]


def test_a_session_that_has_ended_meanwhile_is_started_again(place):
    with Dev(place) as dev:
        dev.wait_for_status(1)
        os.kill(place.owner(), signal.SIGKILL)
        wait_until(lambda: not living_session(place), "the end of the session", LIMIT_S)
        dev.type("r")
        dev.wait_for_status(2)
        assert living_session(place) == ["dev-project"]
        assert dev.leave() == 0

    assert states(place) == ["succeeded"] * 2


def test_a_session_of_the_user_s_is_used_and_left(place):
    place.start("--nodes", "2")
    with Dev(place, "--session", "main") as dev:
        dev.wait_for_status(1)
        assert dev.leave() == 0

    assert dev.out.read_text() == "answer 0 of 2\n"
    assert living_session(place) == ["main"]


@contextlib.contextmanager
def endless_run(place):
    """Let the command run a script that goes on until it is ended."""
    place.write("train.py", ENDLESS)
    with Dev(place) as dev:
        wait_until((place.project / "begun").exists, "the first run", LIMIT_S)
        yield dev


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_and_the_session(place, signum):
    with endless_run(place) as dev:
        dev.process.send_signal(signum)
        assert dev.process.wait(LIMIT_S) == 128 + signum

    assert living_session(place) == []
    assert states(place) == ["cancelled"]


def test_the_death_of_the_command_ends_its_run_and_its_session(place):
    with endless_run(place) as dev:
        worker = int((place.project / "pid").read_text())
        dev.process.kill()
        wait_until(lambda: not proc.is_running(worker), "the end of the worker")

    wait_until(lambda: not living_session(place), "the end of the session", LIMIT_S)
    log = "".join(one.read_text() for one in place.session_dir().rglob("rank-0.log"))
    assert "ends: the command that it was started for has ended" in log


def test_a_second_command_in_the_folder_has_a_session_of_its_own(place):
    with Dev(place) as first:
        first.wait_for_status(1)
        with Dev(place, log="second") as second:
            second.wait_for_status(1)
            assert sorted(living_session(place)) == ["dev-project", "dev-project-2"]
            said = f"another `muster dev` runs in this folder (process {first.process.pid})"
            said += "; this one has a session of its own, dev-project-2"
            assert said in second.err.read_text()
            place.write("model.py", "ANSWER = 3\n")
            first.wait_for_status(2)
            second.wait_for_status(2)
            assert first.leave() == 0
            assert living_session(place) == ["dev-project-2"]
            second.type("r")
            second.wait_for_status(3)
            # Its own, also where the first name is free.
            assert living_session(place) == ["dev-project-2"]
            assert second.leave() == 0

    assert first.out.read_text() == "answer 0 of 1\nanswer 3 of 1\n"
    assert second.out.read_text() == "answer 0 of 1\nanswer 3 of 1\nanswer 3 of 1\n"
    assert living_session(place) == []


def waiting_for(lock):
    """Return how many processes wait for a lock that another one has."""
    inode = f":{lock.stat().st_ino} "
    with open("/proc/locks") as locks:
        return sum("-> FLOCK" in line and inode in line for line in locks)


def test_two_of_one_instant_have_a_session_each(place):
    place.home.mkdir(exist_ok=True)
    lock = place.home / "dev.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with Dev(place) as first, Dev(place, log="second") as second:
            wait_until(lambda: waiting_for(lock) == 2, "both to look for a name", LIMIT_S)
            assert living_session(place) == []
            fcntl.flock(held, fcntl.LOCK_UN)
            for dev in (first, second):
                assert dev.wait_for_success(1).startswith("muster: ran ")
            assert sorted(living_session(place)) == ["dev-project", "dev-project-2"]
            for dev in (first, second):
                assert dev.leave() == 0


def test_keys_of_a_terminal_run_again_and_leave(place, on_terminal):
    with on_terminal(*MUSTER, "dev", "train.py") as terminal:
        terminal.wait_for("answer 0 of 1", "Enter: again, q: quit", limit_s=LIMIT_S)
        place.write("model.py", "ANSWER = 5\n")
        text = terminal.wait_for("answer 5 of 1", "saved model.py", limit_s=LIMIT_S)
        assert "answer 0" not in text  # the screen has the last result
        place.write("model.py", "ANSWER = 6\n")
        terminal.wait_for("answer 6 of 1", WAITS, limit_s=LIMIT_S)
        terminal.press("q")
        assert terminal.wait_for_end(LIMIT_S) == 0


def test_keys_are_heard_again_after_ctrl_z_and_fg(place, on_terminal):
    with on_terminal("/bin/bash", "--norc", "--noprofile", "-i") as terminal:
        terminal.wait_for("shell>", limit_s=LIMIT_S)
        terminal.press(f"{shlex.join([*MUSTER, 'dev', 'train.py'])}\n")
        terminal.wait_for("answer 0 of 1", "q: quit", limit_s=LIMIT_S)
        for way in ("fg", "bg; clear; fg"):
            terminal.press("\x1a")
            terminal.wait_for("Stopped", "shell>", limit_s=LIMIT_S)
            terminal.press(f"clear; {way}\n")
            terminal.wait_for(WAITS, "q: quit", limit_s=LIMIT_S, without=["Stopped"])
        terminal.press("r")
        wait_until(lambda: len(states(place)) == 2, "the run of a key", LIMIT_S)
        terminal.wait_for("answer 0 of 1", WAITS, limit_s=LIMIT_S)
        terminal.press("q")
        terminal.wait_for("shell>", limit_s=LIMIT_S)
        assert living_session(place) == []
        terminal.press("exit\n")
        terminal.wait_for_end(LIMIT_S)


def test_pdb_opens_on_the_rank_that_failed_and_a_save_leaves_it(place, on_terminal):
    place.write(
        "train.py",
        "import os\nbatch = 41\nif os.environ['RANK'] == '1':\n    raise ValueError(batch)\n"
        "import time\ntime.sleep(600)\n",
    )
    command = [*MUSTER, "dev", "--nproc-per-node", "2", "--pdb", "train.py"]
    with on_terminal(*command) as terminal:
        terminal.wait_for("(Pdb)", "rank 1 on n1 has failed", limit_s=LIMIT_S)
        terminal.press("p batch + 1\n")
        terminal.wait_for("\n42", limit_s=LIMIT_S)
        place.write("train.py", "print('mended', flush=True)\n")
        terminal.wait_for("mended", "saved train.py", limit_s=LIMIT_S)
        terminal.press("q")
        assert terminal.wait_for_end(LIMIT_S) == 0
