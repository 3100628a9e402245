"""`--notify` under faults: each is told, with its cause, and no receiver holds up a run."""

import json
import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kit.waiting import wait_until
from torchmuster.core import proc

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")


class Toy(ThreadingHTTPServer):
    """A receiver that answers with the next of `answers`, then 200; `None` never answers."""

    def __init__(self, port=0, answers=()):
        self.asked, self.taken = [], []
        self.answers, self.gone = list(answers), threading.Event()
        super().__init__(("127.0.0.1", port), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def port(self):
        return self.server_address[1]

    def of(self, kind):
        return [one for one in list(self.taken) if one["kind"] == kind]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        notice = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(notice)
        code = self.server.answers.pop(0) if self.server.answers else 200
        if code is None:
            self.server.gone.wait()
            return
        if code == 200:
            self.server.taken.append(notice)
        self.send_response(code)
        self.send_header("Location", "http://127.0.0.1:9/")
        self.end_headers()

    def log_message(self, *words):
        pass


@pytest.fixture
def toy():
    """Return a function that starts a receiver."""
    made = []

    def start(**how):
        made.append(Toy(**how))
        return made[-1]

    yield start
    for one in made:
        one.gone.set()
        one.shutdown()
        one.server_close()


@pytest.fixture
def notified(job, tmp_path):
    """Return a function that starts a job whose notices go to a receiver; its processes are gone after."""
    started = []

    def start(toy, *options, lines=(), **fields):
        path = tmp_path / "who"
        path.write_text("\n".join([f"http://127.0.0.1:{toy.port}/hook", *lines]))
        path.chmod(0o600)
        nodes = options or ("--nodes", "2", "--nproc-per-node", "2")
        started.append(job("--notify", f"@{path}", *nodes, **fields).start())
        return started[-1]

    yield start
    for run in started:
        for facts in proc.all_processes():
            if str(run.home) in _words(facts.pid):
                proc.kill_quietly(facts.pid)


def _words(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read().replace("\0", " ")
    except OSError:
        return ""


def watcher_of(run):
    found = [
        f.pid for f in proc.all_processes() if f" notify --run-dir={run.run_dir} " in _words(f.pid)
    ]
    return found[0] if found else None


def the_end(toy):
    wait_until(lambda: toy.of("end"), "the end was told", 60)
    return toy.of("end")[-1]


FAULTS = """
kill   3  n2  SIGKILL in rank 3 on n2
segv   1  n1  SIGSEGV in rank 1 on n1
raise  2  n2  ValueError: bad batch in rank 2 on n2
exit   0  n1  exit code 3 in rank 0 on n1
"""


def test_each_death_of_a_worker_is_told_with_rank_and_node(notified, toy):
    hook = toy()
    run = notified(hook, "--nodes", "2", "--nproc-per-node", "2", "--restart-policy", "count")
    faults = [line.split(None, 3) for line in FAULTS.strip().splitlines()]
    for number, (word, rank, *_) in enumerate(faults[:3]):
        run.wait_up(number)
        run.order(int(rank), word)
    run.wait_up(3)
    assert run.finish() == 0
    end = the_end(hook)
    assert (end["state"], end["cause"], end["attempts"]) == ("succeeded", None, 4)
    told = [(n["rank"], n["node"], n["cause"], n["id"]) for n in hook.of("attempt")]
    assert told == [
        (int(rank), node, cause, f"{run.run_dir.name}/attempt-{number}-failed")
        for number, (_, rank, node, cause) in enumerate(faults[:3])
    ]
    assert all(one["cause"] in one["text"] for one in hook.of("attempt"))


def test_a_failure_that_no_attempt_follows_is_the_end(notified, toy):
    hook = toy()
    word, rank, node, cause = FAULTS.strip().splitlines()[3].split(None, 3)
    run = notified(hook, "--nodes", "2", "--nproc-per-node", "2", "--max-restarts", "0")
    run.wait_up(0)
    run.order(int(rank), word)
    assert run.wait() == 3
    end = the_end(hook)
    assert (end["state"], end["rank"], end["node"]) == ("failed", int(rank), node)
    assert cause.partition(" in ")[0] in end["text"]
    assert [one["kind"] for one in hook.taken] == ["end"]


def test_lost_agents_are_told_also_that_of_the_head(notified, toy):
    hook = toy()
    run = notified(hook)
    for number, node in enumerate(["n2", "n1"]):
        run.wait_up(number)
        os.kill(run.agent_pid(node), signal.SIGKILL)
    run.wait_up(2)
    assert run.finish() == 0
    assert the_end(hook)["state"] == "succeeded"
    told = hook.of("attempt") + hook.of("restart")
    assert len(told) == 2, hook.asked
    assert all(one["cause"] for one in told)


def test_a_rank_that_stands_still_is_told(notified, toy):
    hook = toy()
    run = notified(hook, "--nproc-per-node", "2", "--hang-timeout", "5s", "--max-restarts", "0")
    ranks = run.wait_up(0, num=2)
    os.kill(ranks[1][0], signal.SIGSTOP)
    assert run.wait(120) == 1
    end = the_end(hook)
    assert (end["state"], end["rank"], end["node"]) == ("failed", 1, "n1")
    assert "SIGSTOP" in end["cause"]
    assert hook.of("hang")[0]["rank"] == 1


def test_a_wait_without_workers_is_told_once(notified, toy):
    hook = toy()
    run = notified(hook, "--before", "sleep 5", "--nproc-per-node", "2", lines=["wait=1s"])
    run.wait_up(0, num=2)
    assert run.finish() == 0
    the_end(hook)
    (one,) = hook.of("waiting")
    assert "without workers" in one["text"]


def test_the_death_of_the_owner_is_told_as_lost(notified, toy):
    hook = toy()
    run = notified(hook)
    run.wait_up(0)
    wait_until(lambda: watcher_of(run), "its process runs")
    run.process.kill()
    assert the_end(hook)["state"] == "lost"


def test_a_stop_is_told(notified, toy):
    hook = toy()
    run = notified(hook)
    run.wait_up(0)
    run.process.send_signal(signal.SIGINT)
    run.wait()
    assert the_end(hook)["state"] == "cancelled"


def test_a_killed_process_of_ours_is_started_again_at_the_end(notified, toy):
    hook = toy()
    run = notified(hook)
    run.wait_up(0)
    wait_until(lambda: watcher_of(run), "its process runs")
    os.kill(watcher_of(run), signal.SIGKILL)
    run.order(3, "kill")
    run.wait_up(1)
    assert run.finish() == 0
    the_end(hook)
    assert hook.of("attempt")[0]["rank"] == 3


def test_a_receiver_that_is_down_for_a_while_gets_everything_later(notified, toy):
    hook = toy()
    port = hook.port
    hook.shutdown()
    hook.server_close()
    run = notified(hook)
    run.wait_up(0)
    run.order(1, "kill")
    run.wait_up(1)
    assert run.finish() == 0
    later = toy(port=port)
    the_end(later)
    assert [one["kind"] for one in later.taken] == ["attempt", "end"]


def test_a_notice_that_was_refused_comes_again_under_the_same_id(notified, toy):
    hook = toy(answers=[500, 302])
    run = notified(hook)
    run.wait_up(0)
    assert run.finish() == 0
    the_end(hook)
    assert [one["id"] for one in hook.asked] == [f"{run.run_dir.name}/end-1"] * 3


def test_a_receiver_that_never_answers_delays_nobody(notified, toy, tmp_path):
    hook = toy(answers=[None] * 9)
    said = tmp_path / "said"
    run = notified(hook, lines=[f"tee -a {said}"])
    run.wait_up(0)
    run.order(1, "kill")
    wait_until(lambda: hook.asked, "the first notice is on its way")
    run.wait_up(1)
    began = time.monotonic()
    assert run.finish() == 0
    assert time.monotonic() - began < 20  # its own limit is longer
    wait_until(lambda: said.exists() and "succeeded" in said.read_text(), "the other one is told")
    assert "SIGKILL in rank 1" in said.read_text()


def test_no_address_is_in_what_others_see(notified, toy):
    hook = toy()
    run = notified(hook)
    run.wait_up(0)
    wait_until(lambda: watcher_of(run), "its process runs")
    own = [_words(f.pid) for f in proc.all_processes() if str(run.home) in _words(f.pid)]
    assert own
    assert run.finish() == 0
    the_end(hook)
    assert not any("/hook" in words for words in own)
    for path in run.run_dir.rglob("*"):
        if path.is_file() and path.name != "notify":
            assert b"/hook" not in path.read_bytes(), path
    assert (run.run_dir / "notify").stat().st_mode & 0o077 == 0
    assert "/hook" not in run.stdout + run.stderr
