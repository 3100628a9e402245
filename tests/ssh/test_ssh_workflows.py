"""Workflows on real hosts: an sshd each, which share the client's folder or don't."""

import json
import signal
from pathlib import Path

import pytest

from kit.waiting import wait_until
from ssh.hosts import processes_with

# The lead and its helper meet at a barrier; `use` reads what the lead made; `last` runs beside nobody.
THREE = """\
workflow:
  name: three
  groups:
  - name: make
    tasks:
    - name: leader
      lead: true
      command: ["sh", "-c"]
      args: ["muster barrier --name met && echo $HOME > {{output}}/where && sleep 1"]
    - name: helper
      command: ["sh", "-c"]
      args: ["muster barrier --name met; echo helper at $HOME, leader at {{ip:leader}}; sleep 600"]
  - name: use
    tasks:
    - name: reader
      inputs:
      - task: leader
      command: ["sh", "-c"]
      args: ["echo read $(cat {{input:0}}/where) at $HOME > {{output}}/said; cat {{output}}/said"]
  - name: last
    tasks:
    - name: ending
      inputs:
      - task: reader
      command: ["sh", "-c"]
      args: ["echo then $(cat {{input:0}}/said)"]
"""
WAITING = """\
workflow:
  name: waiting
  tasks:
  - name: one
    command: ["sh", "-c"]
    args: ["echo one begins at $HOME; exec sleep 4321"]
  - name: two
    command: ["sh", "-c"]
    args: ["echo two begins at $HOME; exec sleep 4321"]
"""
TRAINING = """\
workflow:
  name: training
  tasks:
  - name: fit
    nodes: 2
    nproc_per_node: 1
    script: fit.py
    environment:
      WORD: from-the-file
"""
FIT = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
places = [None] * dist.get_world_size()
dist.all_gather_object(places, (os.environ["HOME"], os.environ["WORD"]))
if dist.get_rank() == 0:
    print("sum", int(total.item()), "at", *sorted(places))
dist.destroy_process_group()
"""


def site(hosts, names="'a', 'b'", more=""):
    """Write the site and return the options that name it."""
    (hosts.code / "muster.toml").write_text(
        f"[engines.lab]\nkind = 'ssh'\nhosts = [{names}]\n{more}"
    )
    return ("w.yaml", "--on", "lab", "--run-id", "r")


def write(hosts, text):
    (hosts.code / "w.yaml").write_text(text)


def submit(hosts, *words):
    return hosts.run(*words, command="submit")


def task_log(hosts, group, task):
    return hosts.home / "runs" / "r" / "logs" / group / task / "attempt-0" / "rank-0.log"


def wait_for_the_end(hosts):
    """Wait until nothing of the tasks is left on the hosts."""

    def left():
        found = [*processes_with(f"{hosts.folder}/"), *processes_with("4321")]
        return set(found) - hosts.pids()

    wait_until(lambda: not left(), "the end of everything on the hosts", 30)


def test_three_groups_pass_data_on_through_the_shared_folder(hosts):
    homes = list(map(str, hosts.add_all("a", "b", shares=True)))
    write(hosts, THREE)
    _, err = hosts.must(*site(hosts), command="submit")
    result = json.loads((hosts.home / "runs" / "r" / "result.json").read_text())
    assert result["state"] == "COMPLETED", result
    helper = task_log(hosts, "make", "helper").read_text()
    where = Path(hosts.home / "runs" / "r" / "tasks" / "leader" / "output" / "where").read_text()
    assert f"helper at {next(home for home in homes if home != where.strip())}," in helper
    assert f"read {where.strip()} at" in task_log(hosts, "use", "reader").read_text()
    assert "then read" in task_log(hosts, "last", "ending").read_text()
    assert "run r on a, b" in err
    wait_for_the_end(hosts)


def test_a_training_task_takes_its_nodes_from_the_hosts(hosts):
    homes = list(map(str, hosts.add_all("a", "b", shares=True)))
    write(hosts, TRAINING)
    (hosts.code / "fit.py").write_text(FIT)
    hosts.must(*site(hosts), command="submit")
    said = task_log(hosts, "fit-group", "fit").read_text()
    assert "sum 2 at" in said
    assert all(home in said for home in homes)
    assert said.count("from-the-file") == 2
    wait_for_the_end(hosts)


@pytest.mark.lab
def test_more_tasks_than_hosts_share_them_and_that_is_said_once(hosts):
    hosts.add("a", shares=True)
    write(hosts, THREE)
    _, err = hosts.must(*site(hosts, "'a'"), command="submit")
    assert err.count("make has 2 tasks for 1 host: a host runs several of them") == 1


def wait_for_tasks(hosts):
    for task in ("one", "two"):
        log = task_log(hosts, f"{task}-group", task)
        wait_until(lambda log=log: log.exists() and "begins" in log.read_text(), task, 60)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_client_that_ends_leaves_nothing_on_the_hosts(hosts, signum):
    hosts.add_all("a", "b", shares=True)
    write(hosts, WAITING)
    with hosts.start(*site(hosts), command="submit") as process:
        wait_for_tasks(hosts)
        process.send_signal(signum)
        process.communicate(timeout=180)
    wait_for_the_end(hosts)


def test_hosts_that_do_not_see_the_run_directory_are_refused_before_anything_starts(hosts):
    hosts.add("a", shares=True)
    hosts.add("b")
    hosts.add("c")
    write(hosts, WAITING)
    code, _, err = submit(hosts, *site(hosts, "'a', 'b', 'c'"))
    assert code == 2, err
    assert "the hosts b, c don't see the run directory" in err
    assert "MUSTER_HOME=/shared" in err
    assert not list((hosts.home / "runs").iterdir())
    wait_for_the_end(hosts)


@pytest.mark.lab
def test_a_host_that_is_lost_gives_its_task_to_its_next_session(hosts):
    hosts.add("a", shares=True)
    write(
        hosts, WAITING.replace("exec sleep 4321", "test {{attempt}} = 0 || exit 0; exec sleep 4321")
    )
    with hosts.start(*site(hosts, "'a'"), command="submit") as process:
        wait_for_tasks(hosts)
        hosts.cut("a")
        out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err + out
    assert "the connection to a" in err
    wait_for_the_end(hosts)


@pytest.mark.lab
def test_setup_lines_of_the_site_reach_the_tasks(hosts):
    hosts.add("a", shares=True)
    write(hosts, WAITING.replace("exec sleep 4321", "echo $FROM_SETUP $FROM_TABLE"))
    more = "setup = ['export FROM_SETUP=by-line']\nenvironment = { FROM_TABLE = 'by-table' }\n"
    hosts.must(*site(hosts, "'a'", more), command="submit")
    assert "by-line by-table" in task_log(hosts, "one-group", "one").read_text()


def test_a_host_that_does_not_answer_is_left_out_when_others_are_enough(hosts):
    hosts.add("a", shares=True)
    hosts.add_closed("gone")
    write(hosts, WAITING.replace("exec sleep 4321", "true"))
    _, err = hosts.must(*site(hosts, "'gone', 'a'"), command="submit")
    assert "gone: " in err
    assert "the workflow begins without it" in err


def test_dry_run_shows_hosts_and_places_and_calls_nobody(hosts):
    hosts.add_closed("a")
    hosts.add_closed("b")
    write(hosts, THREE)
    out, _ = hosts.must(*site(hosts), "--dry-run", command="submit")
    assert out.count("BatchMode=yes") == 2
    assert "leader: a" in out
    assert "helper: b" in out
    assert not (hosts.home / "runs").exists()


def test_detach_and_too_many_nodes_are_refused_together(hosts):
    write(hosts, TRAINING.replace("nodes: 2", "nodes: 3"))
    (hosts.code / "fit.py").write_text(FIT)
    code, _, err = submit(hosts, *site(hosts), "--detach")
    assert code == 2
    assert "tmux new" in err
    assert "the task fit needs 3 hosts, lab has 2 hosts" in err


def test_exec_status_and_cancel_reach_tasks_on_hosts(hosts):
    home = hosts.add("a", shares=True)
    write(hosts, WAITING)
    with hosts.start(*site(hosts, "'a'"), command="submit") as process:
        wait_for_tasks(hosts)
        code, out, err = hosts.run("r", "one", "--", "sh", "-c", "echo at $HOME", command="exec")
        assert (code, out) == (0, f"at {home}\n"), err
        out, err = hosts.must("r", command="status")
        assert out.count("RUNNING") >= 2
        _, err = hosts.must("r", command="cancel")
        process.communicate(timeout=180)
    assert process.returncode == 128 + signal.SIGTERM
    wait_for_the_end(hosts)


@pytest.mark.lab
def test_restart_goes_on_with_the_groups_that_had_not_finished(hosts):
    hosts.add("a", shares=True)
    text = THREE.replace("echo then", "test -e FLAG || exit 3; echo then")
    write(hosts, text.replace("FLAG", f"'{hosts.code}/flag'"))
    code, _, err = submit(hosts, *site(hosts, "'a'"))
    assert code == 3, err
    (hosts.code / "flag").write_text("")
    _, err = hosts.must("r", command="restart")
    assert "taken from r" in err or "group make has completed" in err


def test_a_task_of_a_host_that_stays_away_goes_to_another(hosts):
    hosts.add("a", shares=True)
    home = hosts.add("b", shares=True)
    write(
        hosts, WAITING.replace("exec sleep 4321", "test {{attempt}} = 0 || exit 0; exec sleep 4321")
    )
    with hosts.start(*site(hosts), command="submit") as process:
        wait_for_tasks(hosts)
        hosts.cut("a", for_good=True)
        moved = hosts.home / "runs" / "r" / "logs" / "one-group" / "one" / "attempt-1"
        wait_until((moved / "rank-0.log").exists, "the next attempt", 60)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=180)
    assert "its task goes to b" in err
    assert f"one begins at {home}" in (moved / "rank-0.log").read_text()
    wait_for_the_end(hosts)
