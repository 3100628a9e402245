"""Sweeps in real pods: one Job whose pods are the members, failed ones again, a pod that goes."""

import json

import pytest

from kit.waiting import wait_until
from lab.kubernetes.bench import RUN_LIMIT_S
from lab.kubernetes.user import NAMESPACE

# A member says where it runs, leaves a file, and waits for one; it needs no torch.
SCRIPT = """
import os, sys, time
number, shared = int(os.environ["MUSTER_SWEEP_N"]), sys.argv[1]
print(f"loss={10 - number}", flush=True)
open(f"made-{number}.txt", "w").write(os.uname().nodename)
open(f"{shared}/begun-{number}-{os.uname().nodename}", "w").close()
while os.path.exists(f"{shared}/hold-{number}"):
    time.sleep(0.1)
if os.path.exists(f"{shared}/fail-{number}"):
    raise ValueError("a member that fails")
"""


@pytest.fixture
def sweep(bench):
    """Return a function that starts a sweep of which two members run at a time."""
    (bench.user.folder / "member.py").write_text(SCRIPT)

    def start(*options, members=6):
        grid = ("--grid", f"n=0:{members}", "--style", "env", "--metric", "loss", "--slots", "2")
        words = ("sweep", "--on", "kubernetes", *grid, *options, "member.py", "--")
        return bench.start_words("s", *words, str(bench.shared))

    return start


def status(bench):
    said = bench.must("status", "s", "--json")
    return json.loads(said[said.index("{") :])


def states(bench):
    if not (bench.user.home / "runs" / "s").exists():
        return [""]
    return [member["state"] for member in status(bench)["members"]]


def began(bench, number):
    return {path.name.split("-", 2)[2] for path in bench.shared.glob(f"begun-{number}-*")}


def hold(bench, *numbers):
    for number in numbers:
        (bench.shared / f"hold-{number}").touch()


def release(bench):
    for path in bench.shared.glob("hold-*"):
        path.unlink()


def test_members_are_the_pods_of_one_job_and_all_comes_back(bench, sweep):
    hold(bench, 0, 1)
    run = sweep()
    wait_until(lambda: began(bench, 0) and began(bench, 1), "two members", RUN_LIMIT_S)
    assert began(bench, 0) | began(bench, 1) == {"s-0", "s-1"}
    jobs = bench.user.objects("jobs.batch")
    told = [(job["spec"]["completions"], job["spec"]["parallelism"]) for job in jobs]
    assert told == [(6, 2)]
    assert not began(bench, 2)
    release(bench)
    assert bench.end(run) == 0
    found = status(bench)
    assert (found["state"], found["best"]) == ("succeeded", 5)
    assert [member["value"] for member in found["members"]] == [10.0, 9.0, 8.0, 7.0, 6.0, 5.0]
    code, said = bench.user.run("logs", "s.3")
    assert (code, "loss=7" in said) == (0, True)
    output = bench.user.home / "runs" / "s" / "members" / "s.1" / "output"
    assert (output / "s-1.s" / "made-1.txt").read_text() == "s-1"
    bench.wait_nothing_left()


def test_what_failed_runs_again_by_one_command(bench, sweep):
    (bench.shared / "fail-1").touch()
    assert bench.end(sweep(members=3)) == 1
    assert states(bench) == ["succeeded", "failed", "succeeded"]
    bench.wait_nothing_left()
    (bench.shared / "fail-1").unlink()
    before = began(bench, 0)
    bench.must("restart", "s", limit_s=RUN_LIMIT_S)
    assert states(bench) == ["succeeded"] * 3
    assert began(bench, 0) == before
    bench.wait_nothing_left()


def test_a_member_of_a_deleted_pod_starts_again(bench, sweep):
    hold(bench, 0, 1, 2)
    run = sweep(members=3)
    wait_until(lambda: began(bench, 0) and began(bench, 1), "two members", RUN_LIMIT_S)
    pods = bench.user.objects("pods")
    (second,) = [p["metadata"]["name"] for p in pods if p["metadata"]["name"].startswith("s-1-")]
    bench.kubectl("delete", "pod", second, "--wait=false")
    wait_until(lambda: "waiting" in states(bench)[:2], "its member waits", RUN_LIMIT_S)
    wait_until(lambda: states(bench).count("running") == 2, "its next pod", RUN_LIMIT_S)
    release(bench)
    assert bench.end(run) == 0
    assert states(bench) == ["succeeded"] * 3
    bench.wait_nothing_left()


def test_cancel_leaves_nothing_and_a_detached_sweep_is_found_from_elsewhere(bench, sweep):
    hold(bench, 0, 1)
    assert bench.end(sweep("--detach", members=3)) == 0
    wait_until(lambda: began(bench, 0) and began(bench, 1), "two members", RUN_LIMIT_S)
    said = bench.must("status", "s", "--json", home=bench.other_home)
    found = json.loads(said[said.index("{") :])
    assert [member["state"] for member in found["members"]] == ["running", "running", "waiting"]
    said = bench.must("cancel", "s")
    assert set(states(bench)) == {"cancelled"}
    bench.wait_nothing_left()


def test_a_sweep_on_a_volume_goes_on_in_its_folder(bench, sweep):
    bench.site(home=str(bench.shared / "home"))
    (bench.shared / "fail-1").touch()
    assert bench.end(sweep(members=2)) == 1
    (bench.shared / "fail-1").unlink()
    bench.must("restart", "s", limit_s=RUN_LIMIT_S)
    assert [m["attempt"] for m in status(bench)["members"]] == [0, 2]


def test_a_server_takes_the_manifest(bench, sweep):
    words = ("sweep", "--on", "kubernetes", "--grid", "n=0:3", "--dry-run", "member.py")
    said = bench.must(*words)
    manifest = said[said.index("{") : said.rindex("}") + 1]
    bench.cluster.kubectl("create", "--dry-run=server", "-n", NAMESPACE, "-f", "-", text=manifest)
