"""`muster sweep` on a pretended cluster whose pods really run: one Job, whose pods are the members."""

import json
import os
import signal
import sys

import pytest

from kit.command import ran
from kit.waiting import wait_until
from places import live

SCRIPT = """
import argparse, os, time
parser = argparse.ArgumentParser()
parser.add_argument("--n", type=int)
parser.add_argument("--folder")
given = parser.parse_args()
print(f"loss={10 - given.n}", flush=True)
open(f"{given.folder}/begun-{given.n}-{time.time_ns()}", "w").close()
while os.path.exists(f"{given.folder}/hold-{given.n}"):
    time.sleep(0.02)
if os.path.exists(f"{given.folder}/file-{given.n}"):
    open("model.txt", "w").close()
if os.path.exists(f"{given.folder}/fail-{given.n}"):
    raise ValueError("a member that fails")
"""
RULE = """
class Above:
    def __init__(self, goal):
        pass
    def report(self, member, step, value):
        return value > 9.5
    def ended(self, member, completed):
        pass
"""
FUNCTION = """
import torchmuster

def square(n):
    return n * n

if __name__ == "__main__":
    print(torchmuster.sweep(square, {"n": range(3)}, on="kube", run_id="s", slots=2).results())
"""


class Lab(live.Lab):
    """Sweeps of a script whose members wait, fail or write a file as files of a folder say."""

    def __init__(self, folder, network):
        super().__init__(folder, network)
        (self.code / "fit.py").write_text(SCRIPT)

    def sweep(self, *words, **more):
        return self(*self.words(*words, **more))

    def words(self, *words, members=5, slots=2):
        grid = ("--on", "kube", "--run-id", "s", "--grid", f"n=0:{members}", "--metric", "loss")
        script = ("fit.py", "--", "--folder", str(self.folder))
        return ("sweep", *grid, "--slots", str(slots), *words, *script)

    def touch(self, *names):
        for name in names:
            (self.folder / name).touch()

    def hold(self, *numbers):
        self.touch(*(f"hold-{number}" for number in numbers))

    def release(self, *numbers):
        for number in numbers:
            (self.folder / f"hold-{number}").unlink()

    def first_pod(self):
        """Begin a sweep of two whose member 0 waits; return its client when that member's pod runs."""
        self.hold(0)
        client = self.popen(*self.words(members=2))
        wait_until(lambda: self.begun(0) == 1, "its first pod")
        return client

    def lose_pod(self):
        """Kill the pod of member 0."""
        (pod,) = [one for one in self.pods() if one["metadata"]["name"].startswith("s-0-")]
        os.kill(int(pod["metadata"]["annotations"]["pid"]), signal.SIGKILL)

    def begun(self, number=None):
        which = "*" if number is None else f"{number}-*"
        return len(list(self.folder.glob(f"begun-{which}")))

    def members(self, home="home"):
        return json.loads(self("status", "s", "--json", home=home).stdout)["members"]

    def states(self, home="home"):
        return [member["state"] for member in self.members(home)]


@pytest.fixture
def lab(tmp_path):
    with live.live_cluster(Lab, tmp_path) as made:
        yield made


@pytest.mark.lab
def test_a_failed_member_stops_no_other_and_only_it_runs_again(lab):
    lab.touch("fail-3")
    done = lab.sweep()
    assert done.returncode == 1, done.stderr
    assert lab.states() == ["succeeded"] * 3 + ["failed", "succeeded"]
    assert [member["value"] for member in lab.members()] == [10.0, 9.0, 8.0, 7.0, 6.0]
    assert "ValueError: a member that fails" in lab("logs", "s.3").stdout
    assert lab.jobs() == []  # it was followed to its end

    (lab.folder / "fail-3").unlink()
    before = lab.begun()
    again = lab("restart", "s")
    assert again.returncode == 0, again.stderr
    assert lab.states() == ["succeeded"] * 5
    assert lab.begun() - before == 1
    assert lab.jobs() == []


def test_members_run_without_a_client_and_any_machine_sees_what_they_left(lab):
    lab.hold(*range(5))
    client = lab.popen(*lab.words())
    wait_until(lambda: lab.begun() == 2, "two members")
    client.send_signal(signal.SIGKILL)
    client.wait()
    assert lab.states() == ["running"] * 2 + ["waiting"] * 3
    assert lab.states("other") == ["running"] * 2 + ["waiting"] * 3
    assert lab("logs", "s.1", home="other").stdout == "loss=9\n"
    assert lab.begun() == 2  # --slots

    lab.release(*range(5))
    wait_until(lambda: lab.begun() == 5, "all members")
    wait_until(lambda: set(lab.states("other")) == {"succeeded"}, "the end", 120)
    assert [member["value"] for member in lab.members("other")] == [10.0, 9.0, 8.0, 7.0, 6.0]
    assert "loss=6" in lab("logs", "s.4", home="other").stdout
    assert lab.jobs() == ["s"]  # for the machine that has submitted it
    refused = lab("restart", "s", home="other")
    assert "all members of the sweep s have succeeded" in refused.stderr

    assert lab("wait", "s").returncode == 0
    assert lab.states() == ["succeeded"] * 5
    assert lab.jobs() == []


@pytest.mark.lab
def test_files_that_went_with_a_pod_are_named_and_the_job_stays(lab):
    lab.touch("file-1")
    assert lab.sweep("--detach", members=2).stdout == "s\n"
    wait_until(lambda: set(lab.ends()) == {"Completed"}, "the end of both pods", 120)
    said = lab("wait", "s")
    assert said.returncode == 15
    assert "files of 1 of 2 members did not come here" in said.stderr
    assert "s.1: 1 file that it made did not come here, and went with pod s-1-" in said.stderr
    assert lab.states() == ["succeeded"] * 2
    assert lab.jobs() == ["s"]
    assert lab("wait", "s").returncode == 15
    assert lab("cancel", "s").returncode == 0
    wait_until(lambda: not lab.jobs(), "the end of the pods")


@pytest.mark.lab
def test_a_cancel_ends_what_runs_and_what_waits_and_a_restart_goes_on(lab):
    lab.touch("hold-1", "hold-2")
    assert lab.sweep("--detach", members=4).stdout == "s\n"
    expected = ["succeeded", "running", "running", "waiting"]
    wait_until(lambda: lab.states() == expected, "two members", 120)
    assert lab("cancel", "s").returncode == 0
    assert lab.states() == ["succeeded"] + ["cancelled"] * 3
    wait_until(lambda: not lab.jobs(), "the end of the pods")
    lab.release(1, 2)
    assert lab("restart", "s").returncode == 0
    assert lab.states() == ["succeeded"] * 4
    assert lab.begun(0) == 1


@pytest.mark.lab
def test_one_member_is_stopped_by_its_own_name_and_by_a_rule(lab):
    lab.hold(*range(3))
    (lab.folder / "code" / "rules.py").write_text(RULE)
    client = lab.popen(*lab.words("--stop", "rules:Above", members=3, slots=3))
    wait_until(lambda: lab.begun() == 3, "three members")
    assert lab("cancel", "s.1").returncode == 0
    wait_until(lambda: lab.states()[:2] == ["stopped", "cancelled"], "two ends", 120)
    lab.release(2)
    assert client.wait(60) == 143
    assert lab.states() == ["stopped", "cancelled", "succeeded"]


@pytest.mark.lab
def test_members_of_several_pods_are_runs_that_this_machine_submits(lab):
    lab.touch("fail-2", *(f"hold-{number}" for number in range(3)))
    client = lab.popen(*lab.words("--nodes", "2", members=3))
    members = lab.folder / "home" / "runs" / "s" / "members"
    for numbers in ((0, 1), (2,)):
        for number in numbers:
            record = members / f"s.{number}" / "events.jsonl"
            wait_until(lambda at=record: at.exists(), "that its pods are reached")
        assert lab.jobs() == [f"s-{number}" for number in numbers]
        if numbers == (0, 1):
            lab.release(0, 1)
    client.send_signal(signal.SIGKILL)  # who comes next follows what runs
    client.wait()
    reached = members / "s.2" / "pods" / "mirror.json"  # written each time its first pod is reached
    before = reached.stat().st_mtime_ns
    client = lab.popen("restart", "s")
    wait_until(lambda: reached.stat().st_mtime_ns != before, "that it is followed again", 60)
    lab.release(2)
    assert client.wait(60) == 1
    assert not (lab.state / "s-2-1").exists()
    assert lab.states() == ["succeeded", "succeeded", "failed"]
    assert lab.jobs() == []
    (lab.folder / "fail-2").unlink()
    lab.touch("hold-2")
    again = lab.popen("restart", "s")
    wait_until((members / "s.2" / "earlier").exists, "that its next pods are reached")
    lab.release(2)
    assert again.wait(60) == 0
    assert lab.states() == ["succeeded"] * 3


def test_a_member_whose_pod_is_lost_begins_again_in_another(lab):
    client = lab.first_pod()
    lab.lose_pod()
    wait_until(lambda: lab.begun(0) == 2, "its second pod")
    lab.release(0)
    assert client.wait(60) == 0
    assert lab.states() == ["succeeded"] * 2


@pytest.mark.lab
def test_a_secret_that_somebody_deletes_is_made_again_before_a_lost_member_needs_it(lab):
    client = lab.first_pod()
    secret = lab.state / "s" / "secret.json"
    before = json.loads(secret.read_text())["data"]
    secret.unlink()
    lab.lose_pod()
    wait_until(secret.exists, "the Secret", 60)
    assert json.loads(secret.read_text())["data"] == before
    wait_until(lambda: lab.begun(0) == 2, "its second pod", 60)
    lab.release(0)
    assert client.wait(60) == 0
    assert lab.states() == ["succeeded"] * 2
    assert lab.jobs() == []


def test_functions_go_along_and_their_values_come_back(lab):
    code = lab.folder / "code"
    (code / "ask.py").write_text(FUNCTION)
    said = ran([sys.executable, "ask.py"], limit_s=120, env=lab.env(), cwd=code)
    assert said.stdout.splitlines()[-1:] == ["[0, 1, 4]"], said.stderr


@pytest.mark.lab
def test_on_a_volume_a_member_goes_on_in_its_folder(lab):
    site = lab.folder / "code" / "muster.toml"
    volume = lab.folder / "volume"
    volume.mkdir()
    lines = [line for line in site.read_text().splitlines() if not line.startswith("home")]
    lines += [f'claims = ["v:{volume}"]', f'home = "{volume}/muster"']
    site.write_text("\n".join(lines))
    lab.touch("fail-1")
    assert lab.sweep(members=2).returncode == 1
    (lab.folder / "fail-1").unlink()
    assert lab("restart", "s").returncode == 0
    assert [member["attempt"] for member in lab.members()] == [0, 2]
