"""What an agent reads: the last line of standard output, and the skill that explains it."""

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from kit.command import MUSTER, muster_env, run_muster, spawned
from kit.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120
FIELDS = (
    *("id", "kind", "state", "exit_code", "attempts", "elapsed_s", "cause", "at", "rank", "node"),
    *("because", "hint", "more", "step", "saved_step", "paths", "next"),
)


@pytest.fixture
def env(tmp_path):
    return muster_env(tmp_path / "home")


def answer(done):
    """Return the answer of a command: all its fields, in the last line."""
    said = json.loads(done.stdout.strip().split("\n")[-1])
    assert set(said) == set(FIELDS)
    return said


def named(run_id):
    """Return a run's name without its time."""
    return re.sub(r"^[0-9]+-[0-9]+-", "", run_id)


def script(folder, text):
    path = folder / "x.py"
    path.write_text(text)
    return str(path)


def test_a_success_is_one_line_and_the_ranks_speak_on_standard_error(tmp_path, env):
    text = "import os; print('rank', os.environ['RANK']); os.system('echo child')"
    plain = script(tmp_path, text)
    done = run_muster("run", "--json", "--nproc-per-node", "2", plain, env=env)
    assert done.stdout.count("\n") == 1
    said = answer(done)
    assert (said["state"], said["exit_code"], said["cause"]) == ("succeeded", 0, None)
    assert "rank 0" in done.stderr
    assert "child" in done.stderr
    assert said["next"] == f"muster report {named(said['id'])}"


def test_a_failure_names_rank_node_cause_and_log(tmp_path, env):
    bad = script(tmp_path, "import os\nif os.environ['RANK'] == '1': raise ValueError('boom')")
    words = ("--json", "--nodes", "2", "--max-restarts", "0", bad)
    done = run_muster("run", *words, env=env)
    said = answer(done)
    assert (said["state"], said["exit_code"], done.returncode) == ("failed", 1, 1)
    assert (said["rank"], said["node"]) == (1, "n2")
    assert "ValueError: boom" in said["cause"]
    (log,) = [line.removeprefix("log: ") for line in said["more"] if line.startswith("log: ")]
    assert "ValueError: boom" in Path(log).read_text()
    assert Path(said["paths"]["logs"]).is_dir()


@pytest.mark.parametrize("words", [("--nodes", "x"), ("--nodes", "0", "--nproc-per-node", "y")])
def test_what_was_not_started_tells_all_that_is_wrong(tmp_path, env, words):
    done = run_muster("run", "--json", *words, script(tmp_path, ""), env=env)
    said = answer(done)
    assert (said["id"], said["exit_code"], done.returncode) == (None, 2, 2)
    assert said["cause"]
    assert said["hint"]
    assert len(said["more"]) == len(words) // 2 - 1
    assert "error:" in done.stderr


def test_the_scripts_own_json_is_the_scripts(tmp_path, env):
    own = script(tmp_path, "import sys; print(sys.argv[1:])")
    done = run_muster("run", own, "--json", env=env)
    assert done.stdout == "['--json']\n"


def test_events_come_as_lines_before_the_answer(tmp_path, env):
    done = run_muster("run", "--json=events", script(tmp_path, ""), env=env)
    *events, said = map(json.loads, done.stdout.strip().split("\n"))
    names = [event["event"] for event in events]
    assert names[0] == "run_started"
    assert names[-1] == "run_ended"
    assert said["state"] == "succeeded"


def test_a_run_in_the_background_has_no_exit_code_until_it_is_waited_for_and_is_begun_again(
    tmp_path, env
):
    plain = script(tmp_path, "import time; time.sleep(3)")
    begun = answer(run_muster("run", "--json", "--detach", plain, env=env))
    assert begun["state"] in ("starting", "running")
    assert begun["exit_code"] is None
    assert begun["next"] == f"muster wait {named(begun['id'])}"
    waited = answer(run_muster("wait", "--json", begun["id"], env=env))
    assert (waited["id"], waited["state"], waited["exit_code"]) == (begun["id"], "succeeded", 0)
    again = answer(run_muster("restart", "--json", begun["id"], env=env))
    assert again["state"] == "succeeded"
    assert again["id"] != begun["id"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("print(1)", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('no')", 1),
        ("1/0", 1),
    ],
)
def test_a_script_in_the_commands_own_process_answers(tmp_path, env, text, code):
    done = run_muster("run", "--json", "--inline", script(tmp_path, text), env=env)
    assert (done.returncode, answer(done)["exit_code"]) == (code, code)
    assert done.stdout.count("\n") == 1


def test_a_sweep_answers(tmp_path, env):
    plain = script(tmp_path, "print('loss=1')")
    said = answer(run_muster("sweep", "--json", plain, "--grid", "a=1,2", env=env))
    assert (said["kind"], said["state"], said["exit_code"]) == ("sweep", "succeeded", 0)


def test_ctrl_c_is_answered(tmp_path, env):
    ready = tmp_path / "ready"
    text = f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(100)"
    words = [*MUSTER, "run", "--json", "--grace", "5s", script(tmp_path, text)]
    quiet = {"stderr": subprocess.DEVNULL, "start_new_session": True}
    with spawned(words, env=env, **quiet) as run:
        wait_until(lambda: ready.exists() or run.poll() is not None, "the script")
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate(timeout=LIMIT_S)
    said = json.loads(out.strip().split("\n")[-1])
    assert (said["state"], said["exit_code"]) == ("cancelled", 130)


def test_the_skill_is_one_text_and_names_every_field_of_an_answer(env):
    text = (ROOT / "SKILL.md").read_text()
    assert run_muster("skill", env=env).stdout == text
    shown = re.search(r"```\n(\{.*?\})\n```", text, re.DOTALL)[1]
    assert set(json.loads(re.sub(r"\s*\n\s*", " ", shown))) == set(FIELDS)


def test_each_command_of_the_skill_is_one(env):
    """A reader that has only this text: every command line in it is known to muster."""
    text = (ROOT / "SKILL.md").read_text()
    lines = set(re.findall(r"`(muster [a-z][^`]*)`", text))
    assert len(lines) > 20
    for line in sorted(lines):
        name = line.split()[1]
        known = run_muster(name, "--help", env=env)
        assert known.returncode == 0, line
        for option in re.findall(r"(?<=\s)--[a-z-]+", line):
            assert option in known.stdout or f"{option}=" in known.stdout, (line, option)


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--json", "--nprocs", "2", "x.py"),
        ("run", "--json"),
        ("run", "--json=evnts", "x.py"),
        ("sweep", "--grd", "lr=1", "--json", "x.py"),
        ("submit", "--json", "no.yaml"),
        ("submit", "--josn", "--json", "no.yaml"),
        ("wait", "--json", "no-such-run"),
        ("run", "--json", "no-such-script.py"),
    ],
)
def test_a_refused_command_answers_with_all_fields_and_a_null_id(env, words):
    done = run_muster(*words, env=env)
    said = answer(done)
    assert done.stdout.count("\n") == 1
    assert (said["id"], said["exit_code"]) == (None, done.returncode)
    assert done.returncode in (2, 4)
    assert said["cause"] in done.stderr
    assert said["paths"] == {"run": None, "logs": None, "snapshots": None, "report": None}


def test_a_workflow_and_who_waits_for_it_answer_as_a_run_does_and_its_dry_run_shows_the_plan(
    tmp_path, env
):
    task = "{name: one, command: [sh], args: [-c, 'echo hello; exit 3']}"
    (tmp_path / "w.yaml").write_text(f"workflow:\n  name: w\n  tasks: [{task}]\n")
    done = run_muster("submit", "--json", "w.yaml", env=env, cwd=tmp_path)
    said = answer(done)
    assert done.stdout.count("\n") == 1
    assert "hello" in done.stderr
    assert (said["kind"], said["state"], said["exit_code"]) == ("workflow", "failed", 3)
    assert (said["cause"], done.returncode) == ("task one failed: exit code 3", 3)
    assert Path(said["paths"]["logs"]).is_dir()
    waited = answer(run_muster("wait", "--json", env=env))
    told = ("kind", "state", "exit_code", "cause")
    assert [waited[field] for field in told] == [said[field] for field in told]
    shown = run_muster("submit", "--json", "--dry-run", "w.yaml", env=env, cwd=tmp_path)
    assert "one" in json.dumps(json.loads(shown.stdout))
