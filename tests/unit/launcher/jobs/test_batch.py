"""What is told of a job that is followed."""

import asyncio
import os
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kit.waiting import wait_until_async
from torchmuster.errors import MusterError
from torchmuster.launcher.jobs import batch
from torchmuster.launcher.jobs.batch import JobReportFilter, JobsFollower
from torchmuster.launcher.model.job import JobState, JobView, Wait

WAIT = Wait(sentence="the node prepares it", hint=None, never=False)
BEING_CREATED = JobView(job_id="7", state=JobState.PENDING, wait=WAIT)


def test_pods_that_come_one_by_one_are_a_line_every_ten_seconds():
    news = JobReportFilter()
    told = [now for now in range(31) if news.should_report(f"{now} of 31 pods", BEING_CREATED, now)]
    assert told == [0, 10, 20, 30]


def test_what_means_something_else_is_told_at_once_and_the_same_words_never():
    news = JobReportFilter()
    assert news.should_report("a", BEING_CREATED, 0.0)
    assert not news.should_report("a", BEING_CREATED, 60.0)
    runs = replace(BEING_CREATED, state=JobState.RUNNING)
    assert news.should_report("b", runs, 60.1)
    assert news.should_report("c", replace(runs, wait=None), 60.2)
    assert news.should_report("d", replace(runs, wait=None), 60.3)


class Jobs(JobsFollower):
    """Follows jobs that exist in this test alone.

    Attributes:
        answers: What `ask` returns or does, one after the other; the last one again and again.
    """

    def __init__(self, *answers):
        self.said = []
        super().__init__(SimpleNamespace(say=self.said.append), "slurm")
        self.jobs, self.is_one = "job 7", True
        self.answers = list(answers)
        self.num_asked = self.num_shown = self.num_cancelled = 0
        self.result, self.is_over = None, False
        self.asking = threading.Event()

    def ended(self):
        return self.result

    def ask(self):
        self.num_asked += 1
        self.asking.set()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer() if callable(answer) else answer

    async def take_answer(self):
        return self.is_over

    def show(self):
        self.num_shown += 1

    def cancel(self):
        self.num_cancelled += 1


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    monkeypatch.setattr(batch, "_LOOK_S", 0.005)


def follow(jobs, *steps):
    """Follow the jobs; meanwhile wait for each step's first function, and call its second."""

    async def play():
        for until, act in steps:
            await wait_until_async(until, "a step")
            act()

    async def both():
        playing = asyncio.create_task(play())
        try:
            return await jobs.follow()
        finally:
            await playing

    return asyncio.run(both())


def test_the_result_ends_it_after_what_is_new_was_shown():
    jobs = Jobs(0.0)
    end = (lambda: jobs.num_asked > 2, lambda: setattr(jobs, "result", "done"))
    assert follow(jobs, end) == "done"
    assert jobs.num_shown > 2


def test_a_scheduler_that_hangs_stops_no_line_and_is_spoken_of_once(monkeypatch):
    monkeypatch.setattr(batch, "_SILENT_S", 0.02)
    let_go = threading.Event()
    jobs = Jobs(lambda: let_go.wait(60) and 0.0, lambda: let_go.wait(60) and 60.0)
    seen = []
    steps = (
        (lambda: jobs.said, lambda: seen.append(jobs.num_shown)),
        (lambda: jobs.num_shown > seen[0] + 5, let_go.set),
        (lambda: jobs.num_asked == 2, lambda: setattr(jobs, "result", "done")),
    )
    assert follow(jobs, *steps) == "done"
    assert jobs.said == ["no word from slurm for 0 s; muster keeps asking"]


def test_an_error_of_the_question_is_raised():
    def fail():
        raise MusterError("slurm is gone")

    with pytest.raises(MusterError, match="slurm is gone"):
        follow(Jobs(fail))


def test_jobs_that_have_ended_without_a_result_are_left(monkeypatch):
    monkeypatch.setattr(batch, "_SETTLE_S", 0.05)
    jobs = Jobs(0.0)
    jobs.is_over = True
    assert follow(jobs) is None


def test_ctrl_c_leaves_the_jobs_by_their_present_name_after_the_question_in_progress(monkeypatch):
    monkeypatch.setattr(batch, "_SECOND_CTRL_C_S", 0.02)
    has_ended = []

    def note_and_cancel():
        threading.Event().wait(0.3)
        has_ended.append(True)
        return 60.0

    jobs = Jobs(note_and_cancel)
    rename = (jobs.asking.is_set, lambda: setattr(jobs, "jobs", "job 8"))
    interrupt = (lambda: jobs.jobs == "job 8", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert follow(jobs, rename, interrupt) is None
    assert jobs.said == ["job 8 continues; again within 3 s cancels it"]
    assert (jobs.num_cancelled, has_ended) == (0, [True])


def test_a_second_ctrl_c_cancels():
    jobs = Jobs(0.0)

    def press():
        return os.kill(os.getpid(), signal.SIGINT)

    steps = (
        (lambda: jobs.num_asked, press),
        (lambda: jobs.said, press),
        (lambda: jobs.num_cancelled, lambda: setattr(jobs, "result", "cancelled")),
    )
    assert follow(jobs, *steps) == "cancelled"
    assert jobs.said[1:] == ["cancelling job 7"]
