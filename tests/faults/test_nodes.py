"""What a run survives on the side of its nodes: agents, spawners, stores, the head, silence."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time

import pytest
from harness import start_pair

from kit.command import muster_env
from kit.waiting import wait_until
from torchmuster.core import proc
from torchmuster.core.engines.local import agent_argv
from torchmuster.core.head.training_policy import FIRST_SAY_S
from torchmuster.core.model import contract
from torchmuster.core.model.failure import OVERUSED
from torchmuster.core.model.lease import SILENT_S
from torchmuster.core.node.options import AgentOrder

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")

# What is said where a lease has ended, and not where an end was seen.
NOT_HEARD = "has not responded for"
NO_MESSAGE = "no message from the head"


@pytest.mark.short
def test_a_killed_agent_is_seen_by_its_closed_connection_and_its_place_filled(job):
    run = job().start()
    first = run.wait_up(0)
    os.kill(run.agent_pid("n2"), signal.SIGKILL)
    lost = run.wait_event("node_lost")
    assert lost["why"].startswith("its agent has gone (")  # it was not its silence
    wait_until(lambda: not any(proc.is_running(p) for p, _ in first.values()), "dead workers")
    second = run.wait_up(1)
    assert set(second) == {0, 1, 2, 3}
    assert run.finish() == 0
    assert run.result()["restarts_spent"] == 1
    assert "n2: its agent has gone" in run.stderr


def test_a_killed_spawner_ends_its_workers_and_costs_one_restart(job):
    run = job().start()
    first = run.wait_up(0)
    os.kill(run.spawner_pid("n2"), signal.SIGKILL)
    run.wait_event("attempt_failed")
    assert not any(proc.is_running(pid) for pid, _ in first.values())
    run.wait_up(1)
    assert run.finish() == 0
    assert "n2: its spawner ended (SIGKILL)" in run.stderr
    assert NOT_HEARD not in run.stderr


def test_a_node_that_is_taken_away_for_what_it_uses_costs_one_restart_and_does_not_join_again(job):
    run = job().start()
    run.wait_up(0)
    agent = run.agent_pid("n2")
    os.kill(agent, contract.OVERUSED_SIGNAL)
    run.wait_up(1)
    assert run.agent_pid("n2") != agent
    assert run.finish() == 0
    assert run.result()["restarts_spent"] == 1
    assert f"n2 was lost: {OVERUSED}" in run.stderr


def test_a_killed_store_costs_one_restart(job):
    run = job().start()
    run.wait_up(0)
    os.kill(run.store_pid(), signal.SIGKILL)
    run.wait_up(1)
    assert run.finish() == 0
    assert "the store of the attempt ended (SIGKILL)" in run.stderr
    assert NOT_HEARD not in run.stderr


def test_a_run_whose_agents_were_killed_leaves_no_folder_behind(job, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    run = job("--nodes", "1", "--nproc-per-node", "1", "--max-restarts", "0")
    run.env = {"TMPDIR": str(temporary)}
    run.start()
    run.wait_up(0, num=1)
    left = {path.name for path in temporary.glob("muster-*")}
    os.kill(run.agent_pid("n1"), signal.SIGKILL)

    assert run.finish() != 0
    assert left
    assert list(temporary.glob("muster-*")) == []


@pytest.mark.short
def test_a_lost_head_gets_a_successor_and_the_other_agents_call_it(job):
    run = job().start()
    first = run.wait_up(0)
    other = run.agent_pid("n2")
    os.kill(run.agent_pid("n1"), signal.SIGKILL)
    gone = [pid for pid, _ in first.values()]
    wait_until(lambda: not any(proc.is_running(pid) for pid in gone), "the workers' end")
    second = run.wait_up(1)
    assert set(second) == {0, 1, 2, 3}
    assert run.agent_pid("n2") == other
    assert run.finish() == 0
    said = "the head's agent ended (SIGKILL): another one takes its place with attempt 1"
    assert said in run.stderr
    assert [e["attempt"] for e in run.events("attempt_started")] == [0, 1]
    assert run.result()["restarts_spent"] == 1
    said = (run.run_dir / "logs" / "agents" / "n2.log").read_text()
    assert NO_MESSAGE not in said


def test_without_an_engine_the_others_end_when_the_heads_connection_does(job, port):
    head, other = start_pair(job, "--nnodes", "2", "--rdzv-endpoint", f"localhost:{port}")
    ranks = head.wait_up(0, num=2)
    if "joined run" in head.stderr:  # whoever bound the port first is the head
        head, other = other, head
    os.kill(head.process.pid, signal.SIGKILL)
    assert other.wait() == 7
    assert "error: the head of this run has ended" in other.stderr
    assert NO_MESSAGE not in other.stderr
    assert not any(proc.is_running(pid) for pid, _ in ranks.values())


def test_a_stopped_agent_loses_its_workers_before_the_next_attempt(job):
    run = job().start()
    first = run.wait_up(0)
    agent = run.agent_pid("n2")
    os.kill(agent, signal.SIGSTOP)
    stopped = time.monotonic()
    second = run.wait_up(1, timeout_s=60)
    started = min(at for _, at in second.values())
    assert started - stopped > 10.0  # not before its lease could have ended
    assert not any(proc.is_running(pid) for pid, _ in first.values())
    os.kill(agent, signal.SIGCONT)
    wait_until(lambda: not proc.is_running(agent), "the end of the agent that woke")
    said = (run.run_dir / "logs" / "agents" / "n2.log").read_text()
    assert "the place of n2 is held by another agent" in said
    assert set(run.up(1)) == {0, 1, 2, 3}
    assert run.finish() == 0


def test_a_pause_that_all_processes_share_costs_no_attempt(job):
    run = job().start()
    run.wait_up(0)
    everybody = [run.process.pid, *run.all_pids()]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(SILENT_S + 3.0)  # the pause itself: longer than every lease
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    run.order(1, "kill")  # it all works still
    run.wait_up(1)
    assert run.finish() == 0
    assert not run.events("node_lost")
    assert [e["attempt"] for e in run.events("attempt_started")] == [0, 1]


def test_a_stopped_agent_rejoins_when_its_place_is_free(job):
    run = job("--nodes", "1:2", "--nproc-per-node", "2", "--grow", "--last-call", "30").start()
    run.wait_up(0)
    agent = run.agent_pid("n2")
    os.kill(agent, signal.SIGSTOP)
    second = run.wait_up(1, num=2, timeout_s=60)
    assert set(second) == {0, 1}
    assert run.world(1) == 2
    os.kill(agent, signal.SIGCONT)
    third = run.wait_up(2, num=4)
    assert set(third) == {0, 1, 2, 3}
    assert run.finish() == 0
    assert run.result()["restarts_spent"] == 1  # growing spends none
    assert "n2 has come" in run.stderr


def test_an_elastic_world_shrinks_at_once_when_a_node_is_lost(job):
    run = job("--nodes", "1:2", "--nproc-per-node", "2", "--last-call", "3600").start()
    run.wait_up(0)
    os.kill(run.agent_pid("n2"), signal.SIGKILL)
    run.wait_up(1, num=2)  # nobody waits for the last call
    assert run.events("node_lost")[0]["why"].startswith("its agent has gone (")
    assert run.world(1) == 2
    assert run.finish() == 0
    assert "the world shrinks to 1 of 2 nodes" in run.stderr


def test_killing_the_client_leaves_no_process_behind(job):
    run = job().start()
    run.wait_up(0)
    run.order(3, "child")
    below = run.all_pids()
    workers = [pid for pid, _ in run.up(0).values()]
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    wait_until(lambda: not any(proc.is_running(pid) for pid in workers), "dead workers")
    wait_until(lambda: not any(proc.is_running(pid) for pid in below), "nothing left")


def test_killing_agent_and_spawner_together_leaves_no_worker(job):
    run = job().start()
    first = run.wait_up(0)
    spawner, agent = run.spawner_pid("n2"), run.agent_pid("n2")
    os.kill(agent, signal.SIGKILL)
    os.kill(spawner, signal.SIGKILL)
    wait_until(lambda: not any(proc.is_running(p) for p, _ in first.values()), "dead workers")
    run.wait_up(1)
    assert run.finish() == 0


def test_a_missing_node_is_named_while_it_is_waited_for_and_an_error_in_the_end(job, port):
    run = job(
        "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}",
        "--rdzv-conf", "join_timeout=8", command="torchrun",
    ).start()  # fmt: skip
    assert run.wait() == 6
    meanwhile, _, end = run.stderr.partition("error: only 1 of 2 nodes came within 8 s")
    assert FIRST_SAY_S <= 5.0
    assert "waiting for 1 of 2 nodes" in meanwhile
    assert "no agent has connected" in meanwhile
    assert end


@pytest.mark.parametrize(
    ("secret", "to_it", "to_the_user"),
    [
        pytest.param(
            None,
            ["the place of n2 is held by another agent"],
            "refused an agent from n2",
            id="a second agent for a place",
        ),
        pytest.param(
            "00" * 32,
            ["refused this agent", "another secret"],
            "it has another secret; the run continues",
            id="an agent with another secret",
        ),
    ],
)
def test_an_agent_too_many_is_refused_and_the_run_goes_on(job, secret, to_it, to_the_user):
    run = job().start()
    run.wait_up(0)
    code, said = call_in(run, place=1, secret=secret)
    assert code == 8
    assert [words for words in to_it if words not in said] == []
    assert run.finish() == 0
    assert to_the_user in run.stderr


def call_in(run, *, place, secret=None):
    """Start one more agent by hand; return its exit code and what it said."""
    stranger = run.folder / f"stranger-{place}-{bool(secret)}"
    stranger.mkdir()
    for name in ("plan.json", "secret"):
        shutil.copy(run.run_dir / name, stranger / name)
    if secret is not None:
        (stranger / "secret").write_text(secret)
    head = json.loads((run.run_dir / "head.json").read_text())
    order = AgentOrder(run_dir=str(stranger), place=place, head=(f"{head['host']}:{head['port']}",))
    done = subprocess.run(agent_argv(order), env=muster_env(run.home), timeout=60, check=False)
    return done.returncode, (stranger / "logs" / "agents" / "n2.log").read_text()


def test_garbage_at_the_door_does_not_disturb_the_run(job):
    run = job().start()
    run.wait_up(0)
    head = json.loads((run.run_dir / "head.json").read_text())
    address = (head["host"], head["port"])
    agent = run.agent_pid("n1")
    before = resident_bytes(agent)
    half_open = [socket.create_connection(address) for _ in range(50)]
    for number in range(10_000):
        with socket.create_connection(address) as caller:
            caller.send(b"GET / HTTP/1.1\r\n\r\n" if number % 2 else b"\xff\xff\xff\xff" * 16)
    for caller in half_open:
        caller.close()
    assert resident_bytes(agent) - before < 20 << 20
    assert len(run.events("attempt_started")) == 1
    run.order(1, "kill")  # the channel still works
    run.wait_up(1)
    assert run.finish() == 0


def resident_bytes(pid):
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_agent_is_small(job):
    run = job().start()
    run.wait_up(0)
    assert resident_bytes(run.agent_pid("n1")) < 40 << 20
    assert resident_bytes(run.agent_pid("n2")) < 40 << 20
    assert run.finish() == 0


def test_a_head_that_stands_still_is_named_and_replaced(job):
    run = job("--nodes", "1", "--nproc-per-node", "1").start()
    first = run.wait_up(0, num=1)
    os.kill(run.agent_pid("n1"), signal.SIGSTOP)
    wait_until(lambda: "the head of n1 has been silent for" in run.stderr, "the line")
    run.wait_up(1, num=1)
    assert not any(proc.is_running(pid) for pid, _ in first.values())
    assert run.finish() == 0
    assert run.result()["restarts_spent"] == 1
    named, _, replaced = run.stderr.partition("another one takes its place with attempt 1")
    assert "the head of n1 has been silent for" in named
    assert replaced


def test_one_sigterm_ends_a_run_whose_head_stands_still(job):
    run = job("--nodes", "1", "--nproc-per-node", "1", "--grace", "3600").start()
    first = run.wait_up(0, num=1)
    os.kill(run.agent_pid("n1"), signal.SIGSTOP)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM  # and not when a grace is over
    assert not any(proc.is_running(pid) for pid, _ in first.values())
    assert run.result()["state"] == "cancelled"


def test_a_spawner_and_a_store_that_stand_still_cost_a_restart_each(job):
    run = job("--nodes", "1", "--nproc-per-node", "1").start()
    run.wait_up(0, num=1)
    os.kill(run.spawner_pid("n1"), signal.SIGSTOP)
    run.wait_up(1, num=1)
    os.kill(run.store_pid(), signal.SIGSTOP)
    run.wait_up(2, num=1)
    assert run.finish() == 0
    assert "the spawner has not responded for 10 s: it is killed" in run.stderr
    assert "the store has not responded for 10 s: it is killed" in run.stderr


def test_a_node_of_an_elastic_job_that_is_called_back_leaves_alone(job, port):
    options = ("--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", "last_call_timeout=60")
    head, other = start_pair(job, "--nnodes", "1:2", *options)
    head.wait_up(0, num=2)
    if "joined run" in head.stderr:  # whoever bound the port first is the head
        head, other = other, head
        head.folder = other.folder  # both jobs' workers write there
    os.kill(other.process.pid, signal.SIGTERM)
    head.wait_up(1, num=1)
    assert head.world(1) == 1
    assert other.wait() == 128 + signal.SIGTERM
    assert "the job continues without it" in other.stderr
    head.stop_workers()
    assert head.wait() == 0
    assert head.result()["restarts_spent"] == 0


def test_a_spare_node_takes_the_place_of_a_lost_one_at_once(job):
    run = job("--nodes", "2", "--spares", "1", "--nproc-per-node", "2").start()
    run.wait_up(0)
    agent = run.agent_pid("n2")
    # Nothing else can bring a node: what would start another agent stands still.
    os.kill(run.process.pid, signal.SIGSTOP)
    os.kill(agent, signal.SIGKILL)
    try:
        second = run.wait_up(1)
    finally:
        os.kill(run.process.pid, signal.SIGCONT)
    assert set(second) == {0, 1, 2, 3}
    assert run.wait_event("spare_taken")["node"] == "n3"
    run.wait_event("spare_joined")
    assert run.finish() == 0
    assert "the spare n3 takes the place of n2" in run.stderr
    assert "n2 has joined as a spare node" in run.stderr


def test_the_loss_of_a_spare_node_is_only_said(job):
    run = job("--nodes", "1", "--spares", "1", "--nproc-per-node", "2").start()
    run.wait_up(0, num=2)
    run.wait_event("attempt_started")
    os.kill(run.agent_pid("n2"), signal.SIGKILL)
    run.wait_event("spare_lost")
    run.wait_event("spare_joined")
    assert run.finish() == 0
    assert run.result()["attempts"] == 1
    assert run.result()["restarts_spent"] == 0
