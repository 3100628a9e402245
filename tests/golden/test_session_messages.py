"""What `muster run --session` says of a session that lives, is busy or has gone, word for word."""

import json
import os
import shlex
import subprocess
import sys

import pytest
from test_bad_input import transcript

from kit.command import muster_env, run_muster
from kit.sessions import session_setup
from kit.values import run_plan, run_result
from torchmuster.core.files import atomic
from torchmuster.core.model import codec
from torchmuster.core.model.plan import ScriptKind
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import render_report, report_of_error
from torchmuster.core.model.verdict import Report
from torchmuster.core.owner.create import create_run_dir, write_owner
from torchmuster.errors import ChannelError, SessionBusyError
from torchmuster.multirun.cli.session import error_at_end
from torchmuster.multirun.engine import HeldSession, ended
from torchmuster.multirun.server.call import SESSION_FILE, SessionAgent
from torchmuster.multirun.sweep.runs import error_of_start
from torchmuster.multirun.views.sessions import why_gone

FILE = "sessions.txt"
RUN_ID = "20261122-120000-session-main-12ab"
# Of a session that lives, and of one whose owner has gone.
COMMANDS = {
    "session_of_a_name_that_is_taken": (True, "session start"),
    "run_wider_than_its_session": (True, "run --session main --nodes 3 train.py"),
    "options_that_a_session_has_decided": (
        True,
        "run --session main --on slurm --time 1h --mem 4G --debugpy --ship-env train.py",
    ),
    "session_of_a_similar_name": (True, "run --session mian train.py"),
    "session_whose_owner_has_gone": (False, "run --session main train.py"),
}
CODES = {
    "session_of_a_similar_name": 4,
    "session_whose_owner_has_gone": 4,
}


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Return a function that makes the record of a session of two nodes, whose owner lives or not."""
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    (tmp_path / "work/train.py").write_text("raise SystemExit('this must never run')\n")

    def record(*, lives):
        python = (sys.executable,)
        plan = run_plan(
            2, run_id=RUN_ID, kind=ScriptKind.COMMAND, target="muster:door", python=python
        )
        run_dir = create_run_dir(plan)
        setup = session_setup(nodes=2, python=python)
        atomic.write_json(os.path.join(run_dir.path, SESSION_FILE), codec.to_plain(setup))
        owner = os.getpid()
        if not lives:
            with subprocess.Popen(["true"]) as gone:
                owner = gone.pid
        write_owner(run_dir, owner)
        return run_dir

    return record


@pytest.mark.parametrize("name", COMMANDS)
def test_what_can_t_be_done_in_a_session_is_said_in_these_words(name, make, tmp_path, golden):
    lives, shown = COMMANDS[name]
    make(lives=lives)
    env = muster_env(tmp_path / "home", MUSTER_ON="local", CUDA_VISIBLE_DEVICES="")
    done = run_muster(*shlex.split(shown), env=env, cwd=tmp_path / "work")
    assert (done.stdout, done.returncode) == ("", CODES.get(name, 2))
    golden(FILE, name, transcript(tmp_path, shown, done).replace(RUN_ID, "$SESSION"))


def said(error):
    return render_report(report_of_error(error))


def hidden(text, place):
    """Return a text without what differs from run to run."""
    return text.replace(str(place), "$TMP").replace(RUN_ID, "$SESSION")


def test_a_session_that_never_opened_is_told_in_the_words_of_its_result(make, tmp_path, golden):
    run_dir = make(lives=False)

    def told():
        return hidden(said(error_at_end(run_dir, "main")), tmp_path)

    golden(FILE, "session_that_left_no_word", told())
    report = Report(
        error="1 host can't be used: nosuch.invalid",
        at="--on ssh",
        because=("nosuch.invalid: ssh: Could not resolve hostname nosuch.invalid",),
        hint="is the name right? look in ~/.ssh/config and DNS",
    )
    result = run_result(RunState.FAILED, 5, run_id=RUN_ID, attempts=0, elapsed_s=0.0, report=report)
    atomic.write_json(run_dir.result, codec.to_plain(result))
    golden(FILE, "session_on_a_host_without_address", told())
    lines = [*told().splitlines(), "error: of another slot", "  because: it is another"]
    of_sweep = error_of_start("\n".join(["muster: a note", *lines]), "$SWEEP/logs/agents/slots.log")
    golden(FILE, "slots_on_a_host_without_address", said(of_sweep))
    assert said(error_of_start(lines[0], "there")).splitlines()[1:] == ["  at: there"]


def test_what_a_door_refuses_is_said_in_these_words(make, tmp_path, golden):
    golden(FILE, "busy_session", said(SessionBusyError("main", "20261122-120100-train-34cd")))
    agent = SessionAgent(None, "main", "the session's server on node 1 does not answer")
    with pytest.raises(ChannelError) as gone:
        agent.wait_started()
    golden(FILE, "door_that_went_while_it_was_asked", said(gone.value))
    shut = ChannelError(
        "the session's server on node 0 does not answer", where="/tmp/x/door.sock", why="refused"
    )
    golden(FILE, "door_that_stays_shut", said(ended("main", shut)))

    run_dir = make(lives=True)
    held = HeldSession(name="main", run_dir=run_dir, lives=lambda: False)
    golden(FILE, "session_that_can_t_be_reached", hidden(said(why_gone(held, shut)), tmp_path))
    (tmp_path / "home/runs" / RUN_ID / "result.json").write_text(json.dumps({}))
    golden(FILE, "session_that_has_ended", hidden(said(why_gone(held, shut)), tmp_path))
