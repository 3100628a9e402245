"""Sessions on this machine: what they start is an ordinary run, of the code that was saved last."""

import hashlib
import json
import os
import re
import signal
from pathlib import Path

import pytest

from conftest import WAITING, begin, let_go, processes_of, waiting_run, workers_of
from kit.records import newest_run
from kit.waiting import wait_until
from torchmuster.core import proc


@pytest.mark.short
def test_a_run_in_a_session_is_an_ordinary_run_of_the_code_saved_last(place):
    place.start("--nodes", "2", "--nproc-per-node", "2")
    for answer in range(5):
        place.write("model.py", f"ANSWER = {answer}\n")
        done = place.run()
        assert done.returncode == 0, done.stderr
        assert f"answer {answer} of 4" in done.stdout
        assert "imports its modules again" not in done.stderr
    run = newest_run(place.home, "train")
    assert json.loads((run / "plan.json").read_text())["session"] == "main"
    assert json.loads((run / "result.json").read_text())["state"] == "succeeded"
    assert "answer 4" in place.muster("logs", run.name).stdout
    assert place.listed()[0]["door"]["num_runs"] == 5
    assert place.muster("session", "end").returncode == 0
    assert place.listed() == []
    wait_until(lambda: not processes_of(place), "all processes of the session to end")


def code_of(run):
    """Return what rank 0 of a run has recorded of its code."""
    lines = (run / "events.jsonl").read_text().splitlines()
    ends = [event for event in map(json.loads, lines) if event["event"] == "worker_ended"]
    return next(end["code"] for end in ends if end["rank"] == 0)


@pytest.mark.lab
def test_two_hundred_edits_within_the_same_second_and_size_each_run(place):
    place.start()
    for edit in range(int(os.environ.get("MUSTER_CHAOS", "0")) * 2 or 20):
        text = f"ANSWER = {100 + edit % 900}\n"
        place.write("model.py", text)
        done = place.run()
        assert done.returncode == 0, done.stderr
        assert f"answer {100 + edit % 900} of 1" in done.stdout
        run = newest_run(place.home, "train")
        ran = {file["path"]: file for file in code_of(run)["files"]}
        assert set(ran) == {"train.py", "model.py"}
        assert ran["model.py"]["sha256"] == hashlib.sha256(text.encode()).hexdigest()
        assert not ran["model.py"]["changed"]


def test_runs_leave_neither_memory_nor_descriptors_in_the_doors(place):
    place.start("--nodes", "2")
    place.write("train.py", "")
    doors = place.doors()
    assert place.run().returncode == 0  # what is made once is there
    before = [(own_kib(pid), num_open(pid)) for pid in doors]
    for _ in range(20):
        assert place.run().returncode == 0
    assert place.doors() == doors
    for pid, (memory, files) in zip(doors, before, strict=True):
        assert own_kib(pid) - memory < 2048  # 1,000 runs would be 100 MiB
        assert num_open(pid) == files


def own_kib(pid):
    """Return the memory that a process shares with nobody, in KiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))


def num_open(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_an_edited_preloaded_module_is_imported_again(place):
    place.start("--preload", "model")
    assert "answer 0" in place.run().stdout
    place.write("model.py", "ANSWER = 1\n")
    done = place.run()
    assert "answer 1" in done.stdout
    assert "imports its modules again: files of imported modules have changed" in done.stderr
    done = place.run()
    assert "imports" not in done.stderr
    assert "answer 1" in done.stdout


def test_a_preloaded_module_that_is_broken_fails_the_run_not_the_session(place):
    place.start("--preload", "model")
    place.write("model.py", "ANSWER = \n")
    done = place.run()
    assert done.returncode != 0
    assert "--preload model: SyntaxError" in done.stderr
    place.write("model.py", "ANSWER = 7\n")
    assert "answer 7" in place.run().stdout


@pytest.mark.parametrize(
    ("text", "frames"),
    [("def (:\n", ["train.py"]), ("def f():\n    1 / 0\nf()\n", ["train.py"] * 2)],
)
def test_a_traceback_has_the_frames_of_the_script_only(place, text, frames):
    place.start()
    place.write("train.py", text)
    done = place.run("--max-restarts", "0")
    said = done.stderr.partition("muster: attempt 0 ended")[0]
    assert [os.path.basename(name) for name in re.findall(r'File "(.*?)"', said)] == frames


def test_a_variable_that_changed_is_seen_by_imports(place):
    place.start()
    done = place.run(OMP_NUM_THREADS="2")
    assert "variables have changed: OMP_NUM_THREADS" in done.stderr
    assert "answer 0" in done.stdout
    assert "imports" not in place.run(OMP_NUM_THREADS="2").stderr


def test_a_second_run_at_the_same_time_is_refused(place):
    place.start()
    first, _ = waiting_run(place, 1)
    second = place.run()
    assert second.returncode == 2
    assert "error: the session main is busy" in second.stderr
    assert "muster wait" in second.stderr
    refused = place.muster("session", "end")
    assert refused.returncode == 2
    assert "is in the session main" in refused.stderr
    behind = place.run("--detach")
    assert behind.returncode == 0, behind.stderr
    refused_run = newest_run(place.home, "train")
    wait_until((refused_run / "result.json").exists, "the result of a run that could not begin")
    result = json.loads((refused_run / "result.json").read_text())
    assert (result["state"], result["attempts"]) == ("failed", 0)
    assert result["report"]["error"] == "the session main is busy"
    assert "muster wait" in result["report"]["hint"]
    assert place.muster("wait", refused_run.name).returncode == 2
    let_go(place, first)
    assert place.run().returncode == 0


def test_the_death_of_a_client_ends_its_run_and_leaves_the_session(place):
    place.start("--nodes", "2")
    client, _ = waiting_run(place)
    before = {pid for door in place.doors() for pid in proc.descendants(door)}
    client.kill()
    client.communicate(timeout=180)
    wait_until(lambda: not any(map(proc.is_running, before)), "the run's processes to end")
    (place.project / "go").touch()
    assert place.run().returncode == 0


def test_a_killed_agent_with_the_head_is_forked_again(place):
    place.start("--nodes", "2")
    client, _ = waiting_run(place)
    head = proc.children_of(place.doors()[0])[0]
    os.kill(head, signal.SIGKILL)
    workers_of(place)
    assert "the head's agent ended" in let_go(place, client)


def test_a_killed_door_opens_again(place):
    place.start("--nodes", "2")
    old = place.doors()
    os.kill(old[1], signal.SIGKILL)

    def are_new():
        return not set(old) & set(place.doors()) and all(map(proc.is_running, place.doors()))

    wait_until(are_new, "both doors to open again")
    assert "answer 0 of 2" in place.run().stdout


def test_the_death_of_a_session_s_owner_ends_all_of_it(place):
    place.start("--nodes", "2")
    os.kill(place.owner(), signal.SIGKILL)
    wait_until(lambda: not processes_of(place), "the session to end")
    done = place.run()
    assert done.returncode == 4
    assert "error: the session main has ended" in done.stderr
    assert "muster session start --name main" in done.stderr


def last_words(folder):
    """Return what the first door of a session has said up to its end."""
    log = folder / "logs/main/train/attempt-0/rank-0.log"
    wait_until(lambda: "main ends: " in log.read_text(), "its last words")
    return log.read_text()


def test_an_idle_session_says_so_and_ends(place):
    folder = place.start("--idle", "4s")
    wait_until((folder / "result.json").exists, "the session to end")
    said = last_words(folder)
    warned, ended = said.index("ends in "), said.index("main ends: no run began for 4 s")
    assert warned < ended
    assert json.loads((folder / "result.json").read_text())["state"] == "succeeded"


def test_the_time_limit_of_a_session_is_said_before_and_ends_the_run_in_it(place):
    folder = place.start("--nodes", "2", "--time", "25s", "--idle", "off")
    place.write("train.py", WAITING)
    client = begin(place)
    said, _ = client.communicate(timeout=120)
    assert "muster: the session main ends in" in said
    assert "its time limit of 25 s" in said
    assert client.returncode != 0
    wait_until((folder / "result.json").exists, "the session to end")
    log = last_words(folder)
    assert log.index("main ends in ") < log.index("main ends: its time limit of 25 s")
    assert json.loads((folder / "result.json").read_text())["state"] == "succeeded"
    run = newest_run(place.home, "train")
    assert json.loads((run / "result.json").read_text())["state"] != "succeeded"
    wait_until(lambda: not processes_of(place), "all processes to end")


def test_a_session_that_others_may_enter_is_refused(place):
    folder = place.start()
    where = json.loads((folder / "doors/0.json").read_text())["socket"]
    os.chmod(os.path.dirname(where), 0o755)
    done = place.run()
    assert done.returncode == 5
    assert "the server's folder is not only ours" in done.stderr
    os.chmod(os.path.dirname(where), 0o700)
    assert place.run().returncode == 0


def test_what_a_session_can_t_do_is_said_at_once(place):
    assert "there is no session `main`" in place.run().stderr
    pods = place.muster("session", "start", "--on", "kubernetes", "--idle", "soon")
    assert pods.returncode == 2
    assert "a session can't be held on `kubernetes`" in pods.stderr
    assert "`soon` is not a valid duration" in pods.stderr
    place.start()
    assert "there is a session `main` already" in place.muster("session", "start").stderr
    wide = place.run("--nodes", "3", "--on", "slurm")
    assert "the session main has 1 node" in wide.stderr
    assert "`--on` can't be used in a session" in wide.stderr


def test_only_variables_that_an_import_has_read_make_it_import_again(place):
    place.write("model.py", "import os\nANSWER = int(os.environ.get('READ', 0))\n")
    place.start("--preload", "model")
    for name in ("SEED", "WANDB_RUN_ID", "MAIL", "PBS_JOBID"):
        done = place.run(**{name: "1"})
        assert "imports its modules again" not in done.stderr, name
        assert "answer 0" in done.stdout
    for name in ("READ", "NCCL_DEBUG"):
        done = place.run(**{name: "1"})
        assert "imports its modules again: variables have changed: " in done.stderr
        assert name in done.stderr
    done = place.run(READ="7")
    assert "answer 7" in done.stdout
