"""Clients of runs in real pods that go, come from elsewhere, may not reach pods, or cancel."""

import json
import os
import signal

from kit.waiting import wait_until
from torchmuster.errors import MissingRecordError


def test_a_run_goes_on_without_its_client_and_another_home_follows_it(bench):
    run = bench.train()
    run.kill()
    run.wait()
    step = bench.step()
    wait_until(lambda: bench.step() > step + 20, "steps without a client")
    said = bench.must("status", "r", home=bench.other_home)
    assert "running" in said
    said = bench.must("logs", "r", home=bench.other_home)
    assert "attempt 0 of 2 ranks begins at step 0" in said
    bench.stop()
    said = bench.must("wait", "r", home=bench.other_home)
    assert (bench.other_home / "runs" / "r" / "result.json").exists()


def test_a_failure_without_a_client_waits_for_one_in_the_first_pod(bench):
    run = bench.train("--max-restarts", "0")
    run.kill()
    run.wait()
    pod, _ = bench.pod_of_rank(1)
    bench.in_pod(pod, "/usr/bin/kill", "-9", str(bench.rank(1)["pid"]))
    wait_until(lambda: set(bench.pods()) == {0}, "the end of the other pod")
    assert not bench.condition("Failed"), "the first pod keeps the record for who takes it"
    code, said = bench.user.run("wait", "r", home=bench.other_home)
    assert code != 0, said
    report = bench.result(bench.other_home)["report"]
    assert report["error"] == "rank 1 was ended by SIGKILL"
    code, said = bench.user.run("wait", "r")  # the other home looked, this one takes
    assert code != 0, said
    bench.wait_nothing_left()


def test_a_cancel_leaves_nothing_on_the_cluster(bench):
    run = bench.train()
    bench.must("cancel", "r")
    bench.wait_nothing_left()
    bench.end(run)
    assert bench.result()["state"] == "cancelled"
    wait_until(lambda: not bench.user.objects(), "no pod")


def test_without_the_right_to_reach_pods_a_run_whose_files_would_be_lost_is_refused(bench):
    with bench.without_rule("pods/portforward"):
        run = bench.start()
        assert bench.end(run) == 2
    assert 'resources: ["pods/portforward"]' in bench.said
    bench.wait_nothing_left()


def test_without_the_right_to_reach_pods_their_logs_are_followed_and_the_volume_has_the_rest(bench):
    home = bench.shared / "home"
    bench.site(home=str(home))
    with bench.without_rule("pods/portforward"):
        run = bench.train()
        bench.wait_said("pods can't be reached from here, so their logs are followed instead")
        bench.wait_said("attempt 0 of 2 ranks begins at step 0")
        bench.stop()
        assert bench.end(run) == MissingRecordError.exit_code
    assert f"it has ended (succeeded), and they are in {home}/runs/r on its volume" in bench.said
    assert json.loads((home / "runs" / "r" / "result.json").read_text())["state"] == "succeeded"


def test_another_home_runs_commands_shows_stacks_and_cancels(bench):
    run = bench.train()
    host = bench.rank(1)["host"]
    words = ("exec", "r", "--rank", "1", "--", "sh", "-c", "echo rank $RANK is on $(uname -n)")
    said = bench.must(*words, home=bench.other_home)
    assert f"rank 1 is on {host}" in said
    said = bench.must("stacks", "r", home=bench.other_home)
    assert "train.py" in said
    said = bench.must("cancel", "r", home=bench.other_home)
    bench.end(run)
    bench.wait_nothing_left()
    assert bench.result()["state"] == "cancelled"


def test_a_client_whose_way_to_the_pod_is_cut_goes_on_following(bench):
    run = bench.train()
    bench.wait_said("attempt 0 of 2 ranks begins at step 0")
    ways = wait_until(lambda: bench.ways_to_pods(run), "a way to the pod")
    for pid in ways:
        os.kill(pid, signal.SIGKILL)
    new = wait_until(lambda: bench.ways_to_pods(run) - ways, "another way")
    pod, _ = bench.pod_of_rank(1)
    bench.in_pod(pod, "/usr/bin/kill", "-9", str(bench.rank(1)["pid"]))
    bench.wait_said("attempt 1 of 2 ranks begins at step")
    for pid in new:
        os.kill(pid, signal.SIGKILL)
    bench.end_well(run)
    assert bench.said.count("attempt 1 of 2 ranks begins at step") == 1
    assert "attempt 1 ends with step" in bench.said
    bench.wait_nothing_left()
