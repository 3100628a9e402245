"""Kills of what holds a run in a session: what ends, what comes back, and that nothing is left behind."""

import json
import os
import signal

from conftest import let_go, processes_of, waiting_run, workers_of
from kit.records import newest_run
from kit.waiting import wait_until
from torchmuster.core import proc


def parent_of(pid):
    return proc.read_process(pid).parent_pid


def test_a_killed_spawner_is_replaced_and_the_run_goes_on(place):
    place.start("--nodes", "2")
    doors = place.doors()
    client, workers = waiting_run(place)
    spawner = parent_of(workers[1])
    assert parent_of(parent_of(spawner)) == doors[1]
    os.kill(spawner, signal.SIGKILL)
    again = workers_of(place)
    assert not any(map(proc.is_running, workers))
    let_go(place, client)
    run = newest_run(place.home, "train")
    assert json.loads((run / "result.json").read_text())["attempts"] == 2
    wait_until(lambda: not any(map(proc.is_running, again)), "the end of all workers")
    assert place.doors() == doors
    assert place.run().returncode == 0
    assert "imports" not in place.run().stderr


def test_a_door_that_is_killed_with_a_run_in_it_opens_again_and_the_run_goes_on(place):
    place.start("--nodes", "2")
    old = place.doors()
    client, workers = waiting_run(place)
    os.kill(old[1], signal.SIGKILL)
    again = workers_of(place)
    assert not any(map(proc.is_running, [*workers, *old]))
    let_go(place, client)
    wait_until(lambda: not any(map(proc.is_running, again)), "the end of all workers")
    assert all(map(proc.is_running, place.doors()))
    done = place.run()
    assert done.returncode == 0, done.stderr
    assert place.muster("session", "end").returncode == 0
    wait_until(lambda: not processes_of(place), "the end of all processes")
