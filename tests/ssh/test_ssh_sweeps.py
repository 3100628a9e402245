"""Sweeps on real hosts of ssh: one login for each slot, values and metrics back, a host that dies, a session of the user's."""

import json
import os
import signal
import sys

import pytest

from kit.waiting import wait_until

SCRIPT = """\
import os, sys
x = int(os.environ["MUSTER_SWEEP_X"])
print("in", os.getcwd(), "gpus", os.environ.get("CUDA_VISIBLE_DEVICES"), f"loss={x * 10}", flush=True)
if x == 1 and not os.path.exists("mended"):
    raise ValueError("x is 1")
if sys.argv[1:2] == ["wait"]:
    import signal
    signal.pause()
"""
WORDS = ("--style", "env", "--run-id", "s", "--python", sys.executable)


@pytest.fixture
def two(hosts):
    """Two hosts; nothing of a sweep is left on them when the test ends."""
    hosts.add_all("a", "b")
    (hosts.code / "train.py").write_text(SCRIPT)
    yield hosts
    hosts.wait_for_the_end_on("a", "b")


def told(hosts, name="s"):
    out, _ = hosts.must(name, "--json", command="status")
    return json.loads(out)["members"]


def logins(hosts):
    """Return the sessions that the slots of all sweeps have had: each is a run of its own, with one login on its host."""
    return sorted(run.name for run in (hosts.home / "runs").glob("*-session-sweep-*"))


def test_members_run_in_one_session_on_each_host(two):
    words = ("--hosts", "a,b", "--grid", "x=0:5", "--metric", "loss", "--gpus-per-node", "1")
    code, _, said = two.run(*words, *WORDS, "train.py", command="sweep", MUSTER_PROGRESS="off")

    assert code == 1, said
    assert "s.1 (x=1): rank 0 raised ValueError: x is 1" in said
    members = told(two)
    assert [m["state"] for m in members] == ["succeeded", "failed", *["succeeded"] * 3]
    assert [m["value"] for m in members] == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert len(logins(two)) == 2
    logs = [two.run(f"s.{number}", command="logs")[1] for number in range(5)]
    assert all("gpus 0 " in log for log in logs)
    assert {name for log in logs for name in "ab" if f"host-{name}/home" in log} == {"a", "b"}

    (two.code / "mended").touch()
    _, said = two.must("s", command="restart", MUSTER_PROGRESS="off")
    again = told(two)
    assert [m["state"] for m in again] == ["succeeded"] * 5
    # On a busy machine a member may have had a second attempt before; the restart is for the one that failed.
    changed = [
        now["attempt"] != before["attempt"] for now, before in zip(again, members, strict=True)
    ]
    assert changed == [False, True, False, False, False]
    assert len(logins(two)) == 4


def test_a_host_that_dies_costs_its_slot_and_not_its_members(two):
    client = two.start(
        *("--hosts", "a,b", "--grid", "x=2:5", "--grace", "1s", *WORDS, "train.py", "--", "wait"),
        command="sweep",
        MUSTER_PROGRESS="off",
    )
    wait_until((two.home / "runs/s/sweep.json").exists, "the sweep", limit_s=90)

    def first():
        return all("loss" in log for log in logs_of(two, 2))

    wait_until(first, "the first lines of two members", limit_s=90)
    owner = json.loads((two.home / "runs" / logins(two)[0] / "owner.json").read_text())
    os.kill(owner["pid"], signal.SIGKILL)  # with it the connection to its host
    wait_until(lambda: "is lost" in client.stderr.readline(), "the word on the slot", limit_s=90)
    assert [m["state"] for m in told(two)].count("running") == 1
    two.run("s", command="cancel")
    client.communicate(timeout=180)
    assert {m["state"] for m in told(two)} == {"cancelled"}


SAVING = """\
import os, sys, time, torch, torchmuster.train as tm
model = tm.wrap(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=float(os.environ["MUSTER_SWEEP_LR"]))
data = tm.loader(torch.ones(24, 2), global_batch_size=4, shuffle=False)
run = tm.resume(model=model, optimizer=optimizer, data=data, every_steps=1)
for x in data:
    if run.steps_done == 3 and os.environ["MUSTER_SWEEP_LR"] == "0.2":
        while not os.path.exists(os.path.expanduser("~/go")):
            time.sleep(0.05)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.step(loss=loss)
"""


def test_a_member_goes_back_to_the_host_that_has_what_it_saved(two):
    (two.code / "train.py").write_text(SAVING)
    words = ("--hosts", "a,b", "--grid", "lr=0.1,0.2", "--metric", "loss")
    words += (*WORDS, "--grace", "1s", "train.py")
    client = two.start(*words, command="sweep", MUSTER_PROGRESS="off")
    members = two.home / "runs/s/members"
    wait_until((two.home / "runs/s/sweep.json").exists, "the sweep", limit_s=90)
    both = {"s.0": "succeeded", "s.1": "running"}
    wait_until(
        lambda: states(two) == both and saved_step(members / "s.1") == 3, "a save", limit_s=90
    )
    client.send_signal(signal.SIGINT)
    _, said = client.communicate(timeout=180)
    assert client.returncode == 130, said
    (two.folder / "host-b/home/go").touch()

    code, _, said = two.run("s", command="restart", MUSTER_PROGRESS="off")

    assert code == 0, said
    log = two.run("s.1", command="logs")[1]
    assert "resuming after step" in log, log
    assert "no slot" not in said


def states(hosts):
    return {f"s.{number}": m["state"] for number, m in enumerate(told(hosts))}


def saved_step(member):
    path = member / "training.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return max((event["step"] for event in events if event["event"] == "save"), default=None)


def logs_of(hosts, most):
    logs = (hosts.home / "runs/s/members").glob("*/logs/main/train/attempt-0/rank-0.log")
    return ([log.read_text() for log in logs] + [""] * most)[:most]


def test_a_session_of_the_user_runs_one_member_after_the_other(two):
    start = ("start", "--hosts", "a,b", "--python", sys.executable)
    two.must(*start, command="session", MUSTER_PROGRESS="off")
    words = ("--session", "main", "--grid", "x=2:5", "--style", "env", "--run-id", "s", "train.py")
    two.must(*words, command="sweep", MUSTER_PROGRESS="off")
    assert [m["state"] for m in told(two)] == ["succeeded"] * 3
    assert "host-b/home" in two.run("s.0", "--rank", "1", command="logs")[1]
    assert logins(two) == []
    refused = two.run(*words, "--slots", "2", command="sweep")
    assert refused[0] == 2
    two.run("end", command="session")


def test_a_host_that_can_not_be_reached_is_said_before_any_member_starts(two):
    code, _, said = two.run(
        *("--hosts", "a,nowhere", "--grid", "x=2:5", *WORDS, "train.py"), command="sweep"
    )
    assert code == 1
    assert "nowhere" in said
    assert {m["state"] for m in told(two)} == {"waiting"}
