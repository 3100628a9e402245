"""How the head continues a run: which way, in which order, and when not."""

import pytest

from kit.records import failure, lines, start
from kit.values import command_output, run_result
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.links import Link, Links, ResubmitMethod
from torchmuster.core.model.states import RunState
from torchmuster.errors import UsageError
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.jobs.jobs import mark_cancelled, read_links, write_links
from torchmuster.launcher.owner.resubmit import Chain, find_end, parse_method, restarts_spent

AWAY = "sbatch: error: Unable to contact slurm controller (connect failure)"


def result(state=RunState.PREEMPTED, **more):
    return run_result(state, 75, attempts=4, **more)


LOST = result(node_was_lost=True)


class Scheduler:
    """Answers each command by its name; notes what was asked."""

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    def __call__(self, argv):
        self.asked.append(argv)
        name = next(word for word in argv if word in self.answers)
        status, text = self.answers[name]
        return command_output(*((text, "") if status == 0 else ("", text)), status)


@pytest.fixture
def chain(run_dir):
    """Return a function that begins a link whose scheduler answers so."""

    def make(engine="slurm", job_id="7", num=2, way=None, environment=None, **answers):
        ask, dialect = Scheduler(**answers), load_dialect(engine)
        made = Chain(run_dir, dialect, job_id, num, way, ask, environment or {})
        made.begin(0)
        return made

    return make


def go_on(chain, ended=None, *, time_was_up=True, **more):
    """Return whether the run goes on, and what is said of it."""
    said = []
    ended = ended or result()
    return chain.go_on(ended, time_was_up=time_was_up, say=said.append, **more), said


def test_slurm_requeues_first(chain, run_dir):
    made = chain(scontrol=(0, ""))
    assert go_on(made) == (True, ["the run continues: link 2 of 3 is job 7, by requeue"])
    assert made.ask.asked == [["scontrol", "requeue", "7"]]
    newest = read_links(run_dir).newest
    assert newest == Link(job_id="7", way=ResubmitMethod.REQUEUE, first_attempt=4)


def test_a_new_job_waits_for_the_end_of_its_submitter_without_its_variables(chain, run_dir):
    environment = {"PBS_JOBID": "7.ctl", "PBS_CONF_FILE": "/etc/pbs.conf", "HOME": "/root"}
    made = chain("pbs", "7.ctl", environment=environment, qsub=(0, "8.ctl\n"))
    assert go_on(made)[0]
    (argv,) = made.ask.asked
    assert argv[:3] == ["env", "--unset=PBS_JOBID", "qsub"]
    assert "depend=afterany:7.ctl" in argv
    assert read_links(run_dir).newest.job_id == "8.ctl"


def test_a_refused_requeue_leaves_no_link(chain, run_dir):
    assert not go_on(chain(scontrol=(1, "no"), sbatch=(1, "no")))[0]
    links = read_links(run_dir)
    assert (len(links.links), links.ended) == (1, "no way to continue")


def test_a_server_that_is_away_for_a_while_does_not_end_the_run(chain):
    made, pauses = chain(scontrol=(1, "no\n"), sbatch=(1, AWAY)), []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 5:
            made.ask.answers["sbatch"] = (0, "8\n")
        return True

    goes_on, said = go_on(made, pause=pause)
    assert goes_on
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0]
    assert said == [
        "the run can't continue by requeue: no",
        f"the run can't continue by submit: {AWAY}",
        "the run continues: link 2 of 3 is job 8, by submit",
    ]


@pytest.mark.parametrize(
    ("status", "said", "num_asked"),
    [
        (1, AWAY, 4),
        (None, AWAY, 2),
        (1, "sbatch: error: Batch job submission failed: Socket timed out on send/recv", 2),
        (1, "sbatch: error: Access/permission denied", 2),  # it has decided
    ],
)
def test_what_may_have_been_submitted_or_was_refused_is_not_submitted_again(
    chain, status, said, num_asked
):
    made, pauses = chain(scontrol=(1, "no"), sbatch=(status, said)), iter((True, False))
    assert not go_on(made, pause=lambda _: next(pauses))[0]
    assert len(made.ask.asked) == num_asked


def test_a_cancel_while_it_waits_ends_it(chain, run_dir):
    made = chain(scontrol=(1, AWAY), sbatch=(1, AWAY))
    assert not go_on(made, pause=lambda _: mark_cancelled(run_dir) or True)[0]
    assert read_links(run_dir).ended == "cancelled"


@pytest.mark.parametrize("status", [0, -15, -9])
def test_a_job_of_slurm_that_has_lost_a_node_is_requeued_without_being_asked(
    chain, run_dir, status
):
    """Slurm may end the command that asks for it with the job, before it has said so."""
    made = chain(num=0, scontrol=(status, ""))
    goes_on, said = go_on(made, LOST, time_was_up=False)
    assert goes_on
    assert made.ask.asked == [["scontrol", "requeue", "7"]]
    assert said[0].startswith("job 7 has lost a node for good: it is requeued, as slurm does")
    links = read_links(run_dir)
    assert (len(links.links), links.ended) == (1, None)  # the same link


def test_where_a_requeue_is_forbidden_the_run_ends_and_pbs_has_none_for_users(chain):
    forbidden = chain(num=0, scontrol=(1, "disabled"))
    told = "job 7 can't be requeued: disabled"
    assert go_on(forbidden, LOST, time_was_up=False) == (False, [told])
    of_pbs = chain("pbs", num=0)
    assert go_on(of_pbs, LOST, time_was_up=False) == (False, [])
    assert of_pbs.ask.asked == []


def test_a_run_that_lost_a_node_with_its_job_goes_on_in_another(chain, run_dir):
    made = chain("pbs", "7.ctl", qsub=(0, "8.ctl\n"))
    assert go_on(made, LOST, time_was_up=False)[0]
    assert read_links(run_dir).newest.job_id == "8.ctl"


def test_the_next_job_of_a_chain_is_taken_without_a_command(chain, run_dir):
    made = chain(way=ResubmitMethod.CHAIN)
    atomic.write_json(run_dir.job, {"engine": "slurm", "job_id": "7", "chain": ["8", "9"]})
    assert go_on(made)[0]
    assert read_links(run_dir).newest.job_id == "8"


@pytest.mark.parametrize(
    ("state", "time_was_up"), [(RunState.FAILED, True), (RunState.PREEMPTED, False)]
)
def test_a_run_that_ended_for_another_reason_is_not_continued(chain, run_dir, state, time_was_up):
    assert go_on(chain(), result(state), time_was_up=time_was_up) == (False, [])
    assert read_links(run_dir).ended == state.value


def test_no_more_than_k_continuations(chain):
    made = chain(num=1, scontrol=(0, ""))
    assert go_on(made)[0]
    assert go_on(made) == (False, ["link 2 of 2 has ended, and --resubmit 1 is spent"])


def test_a_cancelled_run_is_not_continued_and_not_begun(chain, run_dir):
    made = chain()
    mark_cancelled(run_dir)
    assert not go_on(made)[0]
    assert "cancelled" in made.begin(0)


@pytest.mark.parametrize("state", [RunState.SUCCEEDED, RunState.FAILED])
def test_a_later_job_of_a_complete_run_has_nothing_to_do(chain, run_dir, state):
    made = chain()
    atomic.write_json(run_dir.result, codec.to_plain(result(state)))
    later = chain(job_id="8")
    assert "the run is complete" in later.begin(0)
    again = made.begin(0)  # the scheduler has started the same job again
    assert again is None if state is RunState.FAILED else "the run is complete" in again


def test_a_job_after_one_that_was_killed_notes_itself(chain, run_dir):
    write_links(run_dir, Links(most=3, links=(Link(job_id="7"),)))
    later = chain(job_id="8")
    assert later.links.newest == Link(job_id="8", way=ResubmitMethod.CHAIN)
    assert later.links.label == "link 2 of 3"


def test_restarts_are_one_budget_for_all_links(run_dir, tmp_path):
    for number, left in enumerate((2, 1, None)):
        events = [start(number, number), {**failure(number, number), "restarts_left": left}]
        lines(run_dir.events, events, mode="a")
    assert restarts_spent(run_dir, 3) == 2
    assert restarts_spent(RunDir(str(tmp_path / "new")), 3) == 0


def test_the_end_comes_from_the_first_command_that_tells_it():
    ask = Scheduler(squeue=(1, "no"), scontrol=(0, "JobId=7 RunTime=00:01:00 TimeLimit=00:05:00"))
    assert find_end(load_dialect("slurm"), "7", lambda: 100.0, ask) == 340.0


def test_an_unknown_way_is_a_mistake_with_its_mend():
    with pytest.raises(UsageError, match="`again` is not a way") as caught:
        parse_method("again")
    assert "requeue, submit, chain" in caught.value.fix
