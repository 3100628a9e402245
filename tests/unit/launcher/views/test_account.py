"""What is said of a run, at its end and of one of which not all is known."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from kit.records import event, lines
from kit.values import run_plan, run_result, term
from torchmuster.core.cli.ending import last_line, say_end
from torchmuster.core.files.atomic import write_json
from torchmuster.core.files.claims import Claims
from torchmuster.core.files.layout import RunDir, near, short_id
from torchmuster.core.model import codec
from torchmuster.core.model.narration import ShownOutput
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report
from torchmuster.core.owner.create import choose_run_id
from torchmuster.core.spec.launch import JobLimits, RunRequest
from torchmuster.errors import NotFoundError, UsageError
from torchmuster.launcher.cli.hosts import hosts_restart_place
from torchmuster.launcher.cli.views import ps, status
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.jobs.jobs import cancel_job, make_job, note_refusal
from torchmuster.launcher.spec.site import Site
from torchmuster.launcher.views.account import (
    account_of,
    describe_results,
    how_to_go_on,
)
from torchmuster.launcher.views.find import find_run, view_run
from torchmuster.launcher.views.run_view import lost_head

RUN_ID = "20260101-000000-train-ab12"
ENDED_WELL = run_result(run_id=RUN_ID, elapsed_s=2.0)


LASTED_90_S = [event(0, "run_started"), event(90, "run_ended")]


@pytest.fixture
def run_dir(home):
    made = RunDir(str(home / "runs" / RUN_ID))
    os.makedirs(made.path)
    return made


def account(run_dir):
    return account_of(view_run(run_dir), 0.0)


def leave_result(run_dir, state, **fields):
    result = run_result(state, run_id=RUN_ID, **{"exit_code": 1, "elapsed_s": 2.0, **fields})
    write_json(run_dir.result, codec.to_plain(result))


def test_a_path_is_typed_from_where_one_stands_but_from_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert near(str(tmp_path / "home" / "logs")) == "home/logs"
    assert near("/home/logs") == "/home/logs"
    monkeypatch.chdir("/")
    assert near("/home/logs") == "/home/logs"


def test_job_engine_time_and_reason_are_known_after_the_end(run_dir):
    write_json(run_dir.job, {"engine": "slurm", "job_id": "17", "chain": ["18"]})
    lines(run_dir.events, LASTED_90_S)
    leave_result(run_dir, RunState.FAILED, report=Report(error="rank 3 ended with exit code 1"))

    found = account(run_dir)
    assert (found.engine, found.jobs, found.place) == ("slurm", ("17", "18"), "slurm 18 +1")
    assert found.elapsed_s == 90.0  # of all links: a result knows its own alone
    assert (found.exit_code, found.ended_by) == (1, "rank 3 ended with exit code 1")


def test_the_last_line_counts_the_time_of_all_links_and_heads(run_dir):
    assert last_line(ENDED_WELL, run_dir).startswith("succeeded after 2.0 s")

    lines(run_dir.events, LASTED_90_S)
    assert last_line(ENDED_WELL, run_dir).startswith("succeeded after 1 min 30 s")


def test_a_run_that_went_well_was_ended_by_nothing(run_dir):
    leave_result(run_dir, RunState.SUCCEEDED, exit_code=0)

    found = account(run_dir)
    assert (found.exit_code, found.ended_by, found.place) == (0, None, "local")


def test_a_run_whose_owner_was_killed_says_so(run_dir):
    assert account(run_dir).ended_by == "its owner process has ended without a result"


@pytest.mark.parametrize("left", ["", '{"run_id": "2', "\x00\x01", "[1]", "1e400"])
def test_the_record_says_how_a_run_ended_whose_result_is_damaged_if_it_has_an_end(run_dir, left):
    Path(run_dir.result).write_text(f"{left}\n")
    lines(run_dir.events, [event(2, "run_ended", **codec.to_plain(ENDED_WELL))])

    view = view_run(run_dir)
    assert (view.state, view.result) == (RunState.SUCCEEDED, ENDED_WELL)

    lines(run_dir.events, [event(3, "attempt_started", attempt=1)], mode="a")
    words = "result.json is damaged, and events.jsonl does not say how the run ended"
    assert account(run_dir).ended_by == words


def test_a_result_of_endless_time_is_damaged(run_dir):
    leave_result(run_dir, RunState.FAILED, elapsed_s=float("inf"))

    assert "is damaged" in str(account(run_dir).ended_by)


def test_a_refused_submission_has_failed_with_the_schedulers_reason(run_dir):
    error = EngineError("Slurm knows no such partition", why="invalid partition specified: nope")
    with pytest.raises(EngineError), note_refusal(run_dir):
        raise error

    view = view_run(run_dir)
    assert (view.state, view.result.exit_code) == (RunState.FAILED, 14)
    assert account(run_dir).ended_by == "Slurm knows no such partition"


class Voice:
    """What is said at the end."""

    def __init__(self):
        self.said, self.shown = [], ShownOutput()
        self.say = self.print = self.said.append

    def flush(self, timeout_s):
        pass


def test_an_end_that_the_head_could_not_record_is_recorded_by_who_followed_it(run_dir):
    voice = Voice()
    assert say_end(voice, ENDED_WELL, run_dir) == 0
    assert view_run(run_dir).state is RunState.SUCCEEDED
    assert "recorded" not in " ".join(voice.said)


def test_an_end_that_can_not_be_recorded_is_said_and_no_place_is_named_that_has_gone(run_dir):
    os.rmdir(run_dir.path)
    voice = Voice()
    assert say_end(voice, ENDED_WELL, run_dir) == 0
    why = f"this end can't be recorded in {run_dir.path} (No such file or directory)"
    assert voice.said[-1] == f"{why}: `muster status` won't know of it"
    assert not os.path.exists(run_dir.path), "it is not made anew"


def test_the_last_lines_say_where_snapshots_and_logs_are(run_dir, monkeypatch):
    monkeypatch.chdir(os.path.dirname(run_dir.path))
    assert describe_results(run_dir) == f"logs in {RUN_ID}/logs/main/train"

    for name in ("step-000000100", "step-000000375", "bad-step-000000400", "generation-1"):
        os.makedirs(os.path.join(run_dir.snapshots, name))

    left = f"snapshots in {RUN_ID}/snapshots, the last at step 375"
    assert describe_results(run_dir) == f"{left}; logs in {RUN_ID}/logs/main/train"


def leave_snapshot(folder, step):
    os.makedirs(os.path.join(folder, f"step-{step:09d}"))


def leave_plan(run_dir, target="train.py", **fields):
    plan = run_plan(run_id=RUN_ID, target=target, cwd=run_dir.path, **fields)
    write_json(run_dir.plan, codec.to_plain(plan))


def leave_record(run_dir, folder, saved=None):
    events = [{"event": "resumed", "step": 0, "folder": folder}]
    if saved is not None:
        events.append({"event": "saved", "step": saved + 3, "saved": saved, "folder": folder})
    lines(run_dir.training, events)


GO_ON = "continue with: muster restart train-ab12"
BEGIN = "nothing was saved: muster restart train-ab12 begins at step 0"


def cancelled(**fields):
    return run_result(RunState.CANCELLED, 130, run_id=RUN_ID, elapsed_s=2.0, **fields)


def test_the_last_lines_find_snapshots_in_a_folder_that_the_script_chose(run_dir, tmp_path):
    mine = str(tmp_path / "mine")
    leave_snapshot(mine, 80)
    for folder, last in ((mine, 80), ("s3://bucket/mine", 60)):
        leave_record(run_dir, folder, saved=60)
        found = describe_results(run_dir)
        assert found.startswith(f"snapshots in {folder}, the last at step {last}; ")


@pytest.mark.parametrize("result", [None, cancelled()], ids=["lost", "hard stop"])
def test_an_end_without_a_last_save_says_what_is_saved_and_how_to_go_on(run_dir, tmp_path, result):
    leave_plan(run_dir)
    assert how_to_go_on(run_dir, result) is None  # not every script uses the library

    mine = str(tmp_path / "mine")
    leave_record(run_dir, mine)
    assert how_to_go_on(run_dir, result) == BEGIN

    leave_record(run_dir, mine, saved=60)
    gone = f"saved at step 60; its snapshots can't be seen from here: {mine}"
    assert how_to_go_on(run_dir, result) == gone

    leave_snapshot(mine, 60)
    assert how_to_go_on(run_dir, result) == f"saved at step 60; {GO_ON}"


@pytest.mark.parametrize(
    ("trained", "saved", "text"),
    [
        (125, 125, f"saved at step 125; {GO_ON}"),
        (9, 7, f"stopped at step 9, the last snapshot is of step 7; {GO_ON}"),
        (9, None, f"stopped at step 9, {BEGIN}"),
    ],
)
def test_an_end_with_a_last_save_says_it_in_the_same_sentence(run_dir, trained, saved, text):
    leave_plan(run_dir)
    if saved is not None:
        leave_snapshot(run_dir.snapshots, saved)

    assert how_to_go_on(run_dir, cancelled(trained_step=trained, saved_step=saved)) == text


def test_what_only_its_own_line_can_start_again_is_told_what_is_saved_alone(run_dir):
    leave_plan(run_dir, rdzv_id="job", max_nodes=2)
    leave_snapshot(run_dir.snapshots, 10)

    assert how_to_go_on(run_dir, cancelled()) == "saved at step 10"


def test_the_status_of_a_lost_run_says_how_to_go_on(run_dir):
    leave_plan(run_dir)
    leave_snapshot(run_dir.snapshots, 10)

    shown = CliRunner().invoke(status, [RUN_ID]).output
    assert shown.endswith(f"saved at step 10; {GO_ON}\n")


def test_a_shown_id_is_short_and_finds_its_run_also_where_it_is_a_part_of_another(run_dir):
    os.makedirs(os.path.join(os.path.dirname(run_dir.path), "20260101-000000-pretrain-ab12"))

    assert short_id(RUN_ID) == "train-ab12"
    assert short_id("mine") == "mine"
    assert find_run("train-ab12").run_id == RUN_ID


@pytest.mark.parametrize("command", [[status, RUN_ID], [ps]])
def test_a_script_s_name_breaks_no_line_of_a_view(run_dir, command):
    leave_plan(run_dir, target="train.py\nstate    succeeded\x1b[2J")

    shown = CliRunner().invoke(command[0], command[1:]).output.split("\n")

    assert [line for line in shown if "train.py\\nstate    succeeded\\x1b[2J" in line]
    assert not [line for line in shown if line.startswith("state    succeeded")]


def test_an_ambiguous_word_names_five_candidates_and_how_many_more(run_dir):
    runs = os.path.dirname(run_dir.path)
    for day in range(2, 9):
        os.makedirs(os.path.join(runs, f"2026010{day}-000000-train-ab1{day}"))
    with pytest.raises(NotFoundError, match="`train` names 8 runs") as caught:
        find_run("train")
    newest = ", ".join(f"train-ab1{day}" for day in (8, 7, 6, 5, 4))
    assert caught.value.fix == f"one of: {newest} and 3 more"

    os.makedirs(os.path.join(runs, "20260109-000000-train-ab18"))  # two runs with one short id
    with pytest.raises(NotFoundError, match="`train-ab18` names 2 runs") as caught:
        find_run("train-ab18")
    assert caught.value.fix == "one of: 20260109-000000-train-ab18, 20260108-000000-train-ab18"


def test_a_job_is_named_as_its_script_first(run_dir):
    plan = run_plan(run_id=RUN_ID, target="train.py", cwd=run_dir.path)

    site = Site(name="slurm", kind="slurm")
    job = make_job(plan, run_dir, site, RunRequest(script="train.py"), JobLimits())

    assert "#SBATCH --job-name=train-ab12\n" in load_dialect("slurm").script(job)
    assert "#PBS -N train-ab12\n" in load_dialect("pbs").script(job)


def test_a_missing_command_of_a_scheduler_is_an_error_with_a_hint(run_dir, monkeypatch):
    monkeypatch.setenv("PATH", run_dir.path)

    with pytest.raises(EngineError, match="this machine has no `qdel`") as caught:
        cancel_job(load_dialect("pbs"), "1")

    assert caught.value.exit_code == 14
    assert "muster engines check pbs" in caught.value.fix


def test_a_name_is_a_part_of_the_run_id():
    assert short_id(choose_run_id("train.py", None, "big_run.2")).rpartition("-")[0] == "big_run.2"


@pytest.mark.parametrize("name", ["", "-x", "a b", "a/b", "ä", "x" * 41, "a\n"])
def test_a_name_that_no_folder_or_job_can_have_is_refused(name):
    with pytest.raises(UsageError, match="is not a valid name for a run"):
        choose_run_id("train.py", None, name)


def test_a_name_beside_a_whole_id_is_refused():
    with pytest.raises(UsageError, match="is the whole name already"):
        choose_run_id("train.py", "mine", "other")


@pytest.mark.parametrize("state", [None, RunState.FAILED], ids=["lost", "failed"])
def test_a_run_on_hosts_is_not_begun_anew_while_its_snapshots_are_on_their_disks(
    run_dir, tmp_path, state
):
    leave_plan(run_dir, engine="ssh")
    leave_record(run_dir, str(tmp_path / "theirs"), saved=60)
    if state is not None:  # it was killed hard: the library has told its head of no last save
        leave_result(run_dir, state)

    view = view_run(run_dir)
    with pytest.raises(UsageError, match="the snapshots of train-ab12 can't be seen from here"):
        hosts_restart_place(view.plan, view)


def test_a_run_whose_head_is_lost_says_what_the_others_wait_for(run_dir):
    os.mkdir(run_dir.succession)
    claims = Claims(run_dir.succession)
    claims.take(term(3, members=(0, 1), next_attempt=1))
    assert lost_head(run_dir) == ()
    claims.vote(3, 1)
    (sentence,) = lost_head(run_dir)
    assert sentence.startswith("1 of 2 nodes have lost the head on n1; another one becomes it")
    left = sorted(os.listdir(run_dir.succession))
    assert left == ["lost-3.1", "term-3.json"], "a view writes nothing"
