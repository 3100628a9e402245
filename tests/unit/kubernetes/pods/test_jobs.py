"""How often a scheduler is asked, what becomes of answers that say too little, and which jobs can never start."""

import itertools
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kit.waiting import Clock
from torchmuster.core import proc
from torchmuster.core.files.atomic import write_json
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.states import RunState
from torchmuster.errors import MusterError
from torchmuster.launcher.cli.views import print_status
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.engines.wait_reasons import reasons_of
from torchmuster.launcher.jobs import answers
from torchmuster.launcher.jobs.answers import JobStatusCache, ask_views
from torchmuster.launcher.jobs.jobs import MIN_PERSIST_S, NeverStartsWatch
from torchmuster.launcher.model.job import JobState, JobView
from torchmuster.launcher.views.find import all_runs, view_run
from unit.kubernetes.pods.conftest import shown_job, shown_pod

SLURM = load_dialect("slurm")
KUBERNETES = load_dialect("kubernetes")
INVALID = "slurm_load_jobs error: Invalid job id specified"


class Scheduler:
    """Answers by the command's name: text, or (exit code, words of the error); None where it isn't installed."""

    def __init__(self, **answers):
        self.answers = answers
        self.calls = []

    def __call__(self, argv):
        self.calls.append(argv)
        answer = self.answers.get(argv[0])
        if answer is None:
            raise MusterError(f"`{argv[0]}` can't be started", why="No such file or directory")
        if isinstance(answer, str):
            return proc.CommandOutput(status=0, stdout=answer.encode(), stderr=b"")
        return proc.CommandOutput(status=answer[0], stdout=b"", stderr=answer[1].encode())


def desk_of(**answers):
    """Return a desk, the scheduler that it asks, and its clock."""
    scheduler, clock = Scheduler(**answers), Clock(0.0)
    return JobStatusCache(scheduler, clock), scheduler, clock


def squeue(ids, state="RUNNING"):
    return "".join(f"squeue|{i}|{state}|None|N/A|n1\n" for i in ids)


def test_a_hundred_jobs_cost_one_command_in_an_interval():
    ids = [str(i) for i in range(1, 101)]
    desk, scheduler, clock = desk_of(squeue=squeue(ids))

    for _ in range(20):
        assert len(desk.views(SLURM, ids)) == 100
        assert all(desk.views(SLURM, [i])[i].state is JobState.RUNNING for i in ids)
        clock.now += 0.1
    assert len(scheduler.calls) == 1
    assert desk.views(SLURM, ids).keys() == set(ids)
    assert len(scheduler.calls) == 2


def test_who_looks_at_one_job_after_the_other_still_asks_for_all_at_once():
    ids = [str(i) for i in range(1, 101)]
    desk, scheduler, clock = desk_of(squeue=squeue(ids))
    desk.views(SLURM, ids)
    for job_id in ids:  # a slow look: 5 s for all
        clock.now += 0.05
        assert desk.views(SLURM, [job_id])[job_id].state is JobState.RUNNING
    assert len(scheduler.calls) <= 3  # at 0 s, 2 s and, rarer from then on, 5 s


def test_who_waits_for_long_asks_every_30_s():
    desk, scheduler, clock = desk_of(squeue=squeue(["1"], "PENDING"))
    asked_at = []
    while clock.now < 300:
        before = len(scheduler.calls)
        desk.views(SLURM, ["1"])
        asked_at += [clock.now] * (len(scheduler.calls) - before)
        clock.now += 0.25

    waits = [after - at for at, after in itertools.pairwise(asked_at)]
    assert waits[0] == 2.0
    assert waits == sorted(waits)
    assert waits[-1] == 30.0


def test_news_are_looked_at_closely_again():
    desk, scheduler, clock = desk_of(squeue=squeue(["1"], "PENDING"))
    for _ in range(40):
        desk.views(SLURM, ["1"])
        clock.now += 10
    scheduler.answers["squeue"] = squeue(["1"])
    clock.now += 30
    assert desk.views(SLURM, ["1"])["1"].state is JobState.RUNNING
    asked = len(scheduler.calls)
    clock.now += 2
    desk.views(SLURM, ["1"])
    assert len(scheduler.calls) == asked + 1


def test_what_was_done_to_a_job_is_looked_for_at_once():
    desk, scheduler, _ = desk_of(squeue=squeue(["1"]))
    desk.views(SLURM, ["1"])
    desk.forget()
    desk.views(SLURM, ["1"])
    assert len(scheduler.calls) == 2


def kubectl_get(ids):
    """Return kubectl's answer on Jobs of one running pod each."""
    names = [job_id.rpartition("/")[2] for job_id in ids]
    items = [shown_job(name) for name in names]
    items += [shown_pod({"running": {}}, job=name) for name in names]
    return json.dumps({"kind": "List", "items": items})


def test_runs_on_one_cluster_that_are_followed_cost_one_question_in_ten_seconds_together():
    ids = [f"lab/research/run-{i}" for i in range(20)]
    desk, scheduler, clock = desk_of(kubectl=kubectl_get(ids))
    asked_at = []
    while clock.now < 600:  # each follower looks every second, one after the other
        before = len(scheduler.calls)
        for job_id in ids:
            assert desk.views(KUBERNETES, [job_id])[job_id].state is JobState.RUNNING
            clock.now += 0.05
        asked_at += [clock.now] * (len(scheduler.calls) - before)
    assert all("get jobs.batch,pods" in " ".join(argv) for argv in scheduler.calls)
    settled = [at for at in asked_at if at >= 30]
    assert 15 <= len(settled) <= 60
    assert all(after - at >= 10 for at, after in itertools.pairwise(settled))


def test_news_of_one_run_are_asked_for_once_and_of_the_others_with_them():
    ids = [f"lab/research/run-{i}" for i in range(20)]
    desk, scheduler, clock = desk_of(kubectl=kubectl_get(ids))
    for job_id in ids:
        desk.views(KUBERNETES, [job_id])
    desk.views(KUBERNETES, ids)
    asked, clock.now = len(scheduler.calls), 1.0
    for job_id in ids:  # all are told of a change at the same time, and look one after the other
        desk.doubt(KUBERNETES, [job_id], 0.9)
        desk.views(KUBERNETES, [job_id])
        clock.now += 0.01
    assert len(scheduler.calls) == asked + 1
    desk.doubt(KUBERNETES, ids[:1], 0.9)  # this has been asked for
    desk.views(KUBERNETES, ids[:1])
    assert len(scheduler.calls) == asked + 1


def test_who_comes_while_a_question_is_open_takes_its_answer():
    ids = ["lab/research/run-0", "lab/research/run-1"]
    is_asked, may_answer = threading.Event(), threading.Event()
    scheduler = Scheduler(kubectl=kubectl_get(ids))

    def slow(argv):
        is_asked.set()
        assert may_answer.wait(60)
        return scheduler(argv)

    desk = JobStatusCache(slow, lambda: 0.0)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(desk.views, KUBERNETES, ids)
        assert is_asked.wait(60)
        second = pool.submit(desk.views, KUBERNETES, ids)
        desk.doubt(
            KUBERNETES, ids, -1.0
        )  # an event loop notes news: it must not wait for an answer
        may_answer.set()
        assert first.result(60) == second.result(60)
    assert len(scheduler.calls) == 1


def test_more_ids_than_a_command_line_should_hold_make_more_commands():
    ids = [str(i) for i in range(1, 1202)]
    desk, scheduler, _ = desk_of(squeue=squeue(ids))
    assert len(desk.views(SLURM, ids)) == 1201
    assert len(scheduler.calls) == 3


def test_only_jobs_that_squeue_has_forgotten_are_looked_for_elsewhere():
    scheduler = Scheduler(squeue=squeue(["1", "3"]), sacct="2|2|COMPLETED|0:0|None|x|n1\n")
    found = ask_views(SLURM, ["1", "2", "3"], scheduler)
    assert found["2"].state is JobState.SUCCEEDED
    assert "--jobs=2" in scheduler.calls[1]
    assert len(scheduler.calls) == 2


def test_without_accounting_the_end_is_read_from_scontrol():
    said = "JobId=7 JobName=t JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0 NodeList=n1\n"
    scheduler = Scheduler(squeue=(1, INVALID), scontrol=said)
    view = ask_views(SLURM, ["7"], scheduler)["7"]
    assert (view.state, view.exit_code) == (JobState.FAILED, 3)


def test_a_job_that_the_scheduler_has_forgotten_is_left_out():
    scheduler = Scheduler(squeue=(1, INVALID), sacct=(1, "disabled"), scontrol=(1, INVALID))
    assert ask_views(SLURM, ["7"], scheduler) == {}


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"squeue": (1, "error: Unable to contact slurm controller")}, "Unable to contact"),
        ({"squeue": (None, "")}, "did not answer within 30 s"),
        ({}, "`squeue` can't be started: No such file"),
    ],
)
def test_a_scheduler_that_can_not_tell_makes_no_end_of_a_job(answers, reason):
    view = ask_views(SLURM, ["7"], Scheduler(**answers))["7"]
    assert view.state is JobState.UNKNOWN
    assert reason in view.reason


def test_known_jobs_of_an_answer_with_an_error_are_kept():
    class Pbs(Scheduler):
        def __call__(self, argv):
            self.calls.append(argv)
            text = '{"Jobs": {"1.ctl": {"job_state": "R"}}}'
            return proc.CommandOutput(
                status=153, stdout=text.encode(), stderr=b"Unknown Job Id 2.ctl"
            )

    found = ask_views(load_dialect("pbs"), ["1.ctl", "2.ctl"], Pbs())
    assert {i: view.state for i, view in found.items()} == {"1.ctl": JobState.RUNNING}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Return a function that makes runs that are jobs, with a squeue on PATH that notes its calls."""
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(
        "torchmuster.launcher.jobs.jobs._STATUS_CACHE", JobStatusCache(clock=lambda: 0.0)
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "answer").write_text("")

    def add(state, number=1):
        lines = []
        for index in range(1, number + 1):
            run_dir = RunDir(str(tmp_path / f"home/runs/r{index:03d}"))
            (tmp_path / f"home/runs/r{index:03d}").mkdir(parents=True)
            write_json(run_dir.plan, {})
            write_json(run_dir.job, {"engine": "slurm", "job_id": str(index)})
            lines.append(f"squeue|{index}|{state}|Resources|2026-11-21T10:00:00|\n")
        (tmp_path / "answer").write_text("".join(lines) if state else "")
        path = tmp_path / "bin/squeue"
        path.write_text(
            f"#!/bin/sh\necho x >>{tmp_path}/calls\n"
            f'while read -r line; do echo "$line"; done <{tmp_path}/answer\n'
        )
        path.chmod(0o755)
        return RunDir(str(tmp_path / "home/runs/r001"))

    return add


def test_the_list_of_a_hundred_runs_costs_one_command(cluster, tmp_path):
    cluster("RUNNING", 100)
    for _ in range(3):
        assert {view.state for view in all_runs()} == {RunState.STARTING}
    assert (tmp_path / "calls").read_text() == "x\n"


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("PENDING", RunState.WAITING),
        ("RUNNING", RunState.STARTING),
        ("SPLENDID", RunState.UNKNOWN),
        ("", RunState.UNKNOWN),
        ("CANCELLED", RunState.CANCELLED),
        ("COMPLETED", RunState.LOST),  # without a result it is no success
        ("FAILED", RunState.LOST),
        ("PREEMPTED", RunState.PREEMPTED),
    ],
)
def test_a_run_without_a_result_stands_where_its_job_does(cluster, word, state):
    assert view_run(cluster(word)).state is state


class TestWhoOnlyLooks:
    """A view shows what is known here, and does not wait for each question to a cluster that is silent."""

    @pytest.fixture
    def asked(self, monkeypatch):
        found = []

        def ask(argv, data, limit_s):
            found.append((argv[1], limit_s))
            return proc.CommandOutput(status=None, stdout=b"", stderr=b"")

        monkeypatch.setattr(proc, "ask", ask)
        monkeypatch.setattr(answers, "_QUESTION_LIMIT", [])
        monkeypatch.setattr(answers, "_SILENT", {})
        return found

    def test_a_silent_cluster_is_asked_once_and_another_one_too(self, asked):
        answers.limit_questions()
        for context in ("--context=a", "--context=a", "--context=b"):
            assert answers.ask_patiently(["kubectl", context, "get"], b"", 30.0).status is None
        assert asked == [("--context=a", 5.0), ("--context=b", 5.0)]

    def test_who_follows_asks_again_and_waits_longer(self, asked):
        for _ in range(2):
            answers.ask_patiently(["kubectl", "--context=a", "get"], b"", 30.0)
        assert asked == [("--context=a", 30.0)] * 2

    def test_a_silent_scheduler_costs_its_time_once_for_all_of_its_commands(self, asked):
        answers.limit_questions()
        for command in ("squeue", "scontrol", "sacct"):
            assert answers.ask_patiently([command, "--x"], b"", 30.0).status is None
        answers.ask_patiently(["kubectl", "--context=a"], b"", 30.0)
        assert asked == [("--x", 5.0), ("--context=a", 5.0)]


def test_a_job_that_its_scheduler_has_forgotten_is_said_to_be(cluster, capsys):
    cluster("")
    assert print_status("r001", as_json=False) == 0
    said = "problem  slurm does not know job 1 any more, and the run has left no result\n"
    assert said in capsys.readouterr().out


# Jobs that can never start.


SMALL = "main*|3|8\n"
LARGE = "main*|30|8\n"


class SmallCluster:
    """A clock, and the answers of a scheduler's commands."""

    def __init__(self, sinfo=SMALL):
        self.now, self.asked, self.sinfo = 0.0, [], sinfo

    def ask(self, argv):
        self.asked.append(argv[0])
        said = (
            self.sinfo if argv[0] == "sinfo" else "JobId=5 Partition=main NumNodes=9 MinCPUsNode=1"
        )
        return proc.CommandOutput(status=0, stdout=said.encode(), stderr=b"")

    def watch(self):
        return NeverStartsWatch(ask=self.ask, clock=lambda: self.now)


def view(reason, engine="slurm"):
    known = reasons_of(load_dialect(engine))
    return known.explained(JobView(job_id="5", state=JobState.PENDING, reason=reason))


def judge(scheduler, watch, reason, engine="slurm"):
    watch.judge(view(reason, engine), load_dialect(engine))
    scheduler.now += MIN_PERSIST_S
    return watch.judge(view(reason, engine), load_dialect(engine))


def test_a_partition_that_is_too_small_is_named_with_what_it_has():
    scheduler = SmallCluster()
    report = judge(scheduler, scheduler.watch(), "PartitionNodeLimit")

    assert report.error.startswith("job 5 can never start: it asks for more nodes than")
    assert report.because == (
        "partition main has 3 nodes of 8 CPUs; the job asks for 9 nodes",
        "slurm says: PartitionNodeLimit",
    )


def test_a_partition_that_is_large_enough_is_waited_for_and_asked_once():
    scheduler = SmallCluster(LARGE)
    watch = scheduler.watch()

    assert judge(scheduler, watch, "PartitionNodeLimit") is None
    assert judge(scheduler, watch, "PartitionNodeLimit") is None
    assert scheduler.asked == ["scontrol", "sinfo", "scontrol"]


def test_one_answer_alone_ends_no_wait():
    scheduler = SmallCluster()
    watch = scheduler.watch()

    assert watch.judge(view("BadConstraints"), load_dialect("slurm")) is None
    scheduler.now += MIN_PERSIST_S - 0.1
    assert watch.judge(view("BadConstraints"), load_dialect("slurm")) is None
    scheduler.now += 0.1
    assert watch.judge(view("BadConstraints"), load_dialect("slurm")) is not None


@pytest.mark.parametrize(
    "reason", ["Priority", "Resources", "QOSMaxJobsPerUserLimit", "Dependency"]
)
def test_what_may_pass_is_waited_for(reason):
    scheduler = SmallCluster()

    assert judge(scheduler, scheduler.watch(), reason) is None
    assert scheduler.asked == []


def test_what_pbs_says_never_runs_is_ended():
    scheduler = SmallCluster()
    reason = "Can Never Run: Not enough total nodes available"
    report = judge(scheduler, scheduler.watch(), reason, "pbs")

    assert report.because == (f"pbs says: {reason}",)
    assert scheduler.asked == ["qstat", "pbsnodes"]
    assert os.linesep not in report.error


def test_a_reason_in_other_words_goes_on_with_its_time():
    """A second pod has the same trouble, and the words name both."""
    clock = Clock(0.0)
    watch = NeverStartsWatch(clock=clock)
    seen = reasons_of(KUBERNETES).explained
    word = "ErrImageNeverPull: image is not present"
    one = JobView(job_id="lab/x/y", state=JobState.PENDING, reason=f"{word} (pod 0)")
    both = JobView(job_id="lab/x/y", state=JobState.PENDING, reason=word)
    assert watch.judge(seen(one), KUBERNETES) is None
    clock.now = 2.5
    assert "can never start" in watch.judge(seen(both), KUBERNETES).error
