"""Kills of what holds a run in a session: what ends, what comes back, and that nothing is left behind."""

import json
import os
import signal

from conftest import begin, processes_of
from kit.records import newest_run
from kit.waiting import wait_until
from torchmuster.core import proc

WAITING = """\
import os, pathlib, time, torch.distributed as dist
dist.init_process_group("gloo")
pathlib.Path(f"began-{os.environ['RANK']}").write_text(str(os.getpid()))
while not pathlib.Path("go").exists():
    time.sleep(0.02)
dist.destroy_process_group()
"""


def waiting_run(place):
    """Begin a run on two nodes; return its client and the processes of its workers when all have met."""
    place.write("train.py", WAITING)
    client = begin(place)
    return client, workers_of(place)


def workers_of(place):
    """Wait for both workers of an attempt, and return their processes; their files are removed."""
    files = [place.project / f"began-{rank}" for rank in (0, 1)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), "the workers")
    pids = [int(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return pids


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
    (place.project / "go").touch()
    said, _ = client.communicate(timeout=180)
    assert client.returncode == 0, said
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
    (place.project / "go").touch()
    said, _ = client.communicate(timeout=180)
    assert client.returncode == 0, said
    wait_until(lambda: not any(map(proc.is_running, again)), "the end of all workers")
    assert all(map(proc.is_running, place.doors()))
    done = place.run()
    assert done.returncode == 0, done.stderr
    assert place.muster("session", "end").returncode == 0
    wait_until(lambda: not processes_of(place), "the end of all processes")
