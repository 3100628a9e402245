"""What is told of a job that is followed."""

from dataclasses import replace

from torchmuster.model.job import JobView, Wait
from torchmuster.model.states import JobState
from torchmuster.owner.jobs.batch import JobNews

WAIT = Wait(sentence="the node prepares it", hint=None, never=False)
PREPARED = JobView(job_id="7", state=JobState.PENDING, wait=WAIT)


def test_pods_that_come_one_by_one_are_a_line_every_ten_seconds():
    news = JobNews()
    told = [now for now in range(31) if news.is_told(f"{now} of 31 pods", PREPARED, now)]
    assert told == [0, 10, 20, 30]


def test_what_means_something_else_is_told_at_once_and_the_same_words_never():
    news = JobNews()
    assert news.is_told("a", PREPARED, 0.0)
    assert not news.is_told("a", PREPARED, 60.0)
    runs = replace(PREPARED, state=JobState.RUNNING)
    assert news.is_told("b", runs, 60.1)
    assert news.is_told("c", replace(runs, wait=None), 60.2)
    assert news.is_told("d", replace(runs, wait=None), 60.3)
