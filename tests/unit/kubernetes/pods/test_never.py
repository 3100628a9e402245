import os

import pytest

from torchmuster.core import proc
from torchmuster.kubernetes.engine.dialect import DIALECT as KUBERNETES
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.engines.wait_reasons import reasons_of
from torchmuster.launcher.jobs.jobs import MIN_PERSIST_S, NeverStartsWatch
from torchmuster.launcher.model.job import JobState, JobView

SMALL = "main*|3|8\n"
LARGE = "main*|30|8\n"


class Scheduler:
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
    scheduler = Scheduler()
    report = judge(scheduler, scheduler.watch(), "PartitionNodeLimit")

    assert report.error.startswith("job 5 can never start: it asks for more nodes than")
    assert report.because == (
        "partition main has 3 nodes of 8 CPUs; the job asks for 9 nodes",
        "slurm says: PartitionNodeLimit",
    )


def test_a_partition_that_is_large_enough_is_waited_for_and_asked_once():
    scheduler = Scheduler(LARGE)
    watch = scheduler.watch()

    assert judge(scheduler, watch, "PartitionNodeLimit") is None
    assert judge(scheduler, watch, "PartitionNodeLimit") is None
    assert scheduler.asked == ["scontrol", "sinfo", "scontrol"]


def test_one_answer_alone_ends_no_wait():
    scheduler = Scheduler()
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
    scheduler = Scheduler()

    assert judge(scheduler, scheduler.watch(), reason) is None
    assert scheduler.asked == []


def test_what_pbs_says_never_runs_is_ended():
    scheduler = Scheduler()
    reason = "Can Never Run: Not enough total nodes available"
    report = judge(scheduler, scheduler.watch(), reason, "pbs")

    assert report.because == (f"pbs says: {reason}",)
    assert scheduler.asked == ["qstat", "pbsnodes"]
    assert os.linesep not in report.error


def test_a_reason_in_other_words_goes_on_with_its_time():
    """A second pod has the same trouble, and the words name both."""
    now = [0.0]
    watch = NeverStartsWatch(clock=lambda: now[0])
    seen = reasons_of(KUBERNETES).explained
    word = "ErrImageNeverPull: image is not present"
    one = JobView(job_id="lab/x/y", state=JobState.PENDING, reason=f"{word} (pod 0)")
    both = JobView(job_id="lab/x/y", state=JobState.PENDING, reason=word)
    assert watch.judge(seen(one), KUBERNETES) is None
    now[0] = 2.5
    assert "can never start" in watch.judge(seen(both), KUBERNETES).error
