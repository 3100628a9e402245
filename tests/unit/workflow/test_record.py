"""The states of tasks, groups and workflows, and where their results are."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.events import StartedEvent, parse
from torchmuster.workflow.owner.view import describe_workflow_results
from torchmuster.workflow.record import State, group_state, read_outcome, workflow_state

ORDER = [
    State.SUBMITTING,
    State.WAITING,
    State.PROCESSING,
    State.SCHEDULING,
    State.INITIALIZING,
    State.RUNNING,
]
FINAL = [state for state in State if state not in ORDER]
FAILED = [state for state in FINAL if state.name.startswith("FAILED")]
states = st.sampled_from(list(State))


def test_what_has_ended_is_final():
    assert [state for state in State if state.is_final] == FINAL


def test_only_failures_are_failed():
    assert [state for state in State if state.is_failed] == FAILED
    assert not State.COMPLETED.is_failed
    assert not State.RESCHEDULED.is_failed


@given(st.sampled_from(FINAL), states)
def test_nothing_follows_an_end(state, later):
    assert not state.may_become(later)


@given(st.sampled_from(ORDER), st.sampled_from(FINAL))
def test_every_state_can_end_in_every_way(state, end):
    assert state.may_become(end)


@given(st.sampled_from(ORDER), st.sampled_from(ORDER))
def test_a_state_only_moves_forward(state, later):
    assert state.may_become(later) == (ORDER.index(later) > ORDER.index(state))


@pytest.mark.parametrize(
    ("lead", "other", "state"),
    [
        (State.WAITING, State.SCHEDULING, State.WAITING),
        (State.INITIALIZING, State.SCHEDULING, State.SCHEDULING),
        (State.INITIALIZING, State.RUNNING, State.RUNNING),
        (State.COMPLETED, State.SCHEDULING, State.RUNNING),
        (State.FAILED, State.RUNNING, State.RUNNING),
        (State.COMPLETED, State.COMPLETED, State.COMPLETED),
        # The lead alone decides how it ended.
        (State.COMPLETED, State.FAILED, State.COMPLETED),
        (State.FAILED_EXEC_TIMEOUT, State.COMPLETED, State.FAILED_EXEC_TIMEOUT),
    ],
)
def test_a_group_is_where_its_slowest_task_is_until_one_runs(lead, other, state):
    assert group_state({"a": lead, "b": other}, "a", ignore_nonlead=True) is state


@pytest.mark.parametrize(
    ("ends", "state"),
    [
        ([State.FAILED, State.FAILED_CANCELED, State.FAILED_EVICTED], State.FAILED_CANCELED),
        ([State.FAILED, State.FAILED_EVICTED], State.FAILED_EVICTED),
        ([State.FAILED_PREEMPTED, State.FAILED_EXEC_TIMEOUT], State.FAILED_EXEC_TIMEOUT),
        ([State.FAILED_START_ERROR, State.FAILED_START_ERROR], State.FAILED_START_ERROR),
        ([State.FAILED_START_ERROR, State.FAILED_IMAGE_PULL], State.FAILED),
        ([State.COMPLETED, State.FAILED], State.FAILED),  # the lead is not alone
    ],
)
def test_of_several_failures_the_strongest_names_the_group(ends, state):
    tasks = {str(number): end for number, end in enumerate(ends)}

    assert group_state(tasks, "0", ignore_nonlead=False) is state


@pytest.mark.parametrize(
    ("groups", "state"),
    [
        ([], State.COMPLETED),
        ([State.WAITING, State.SCHEDULING], State.WAITING),
        ([State.WAITING, State.RUNNING], State.RUNNING),
        ([State.COMPLETED, State.WAITING], State.RUNNING),
        ([State.COMPLETED, State.COMPLETED], State.COMPLETED),
        ([State.COMPLETED, State.FAILED_EXEC_TIMEOUT], State.FAILED_EXEC_TIMEOUT),
        ([State.FAILED_UPSTREAM, State.FAILED_IMAGE_PULL], State.FAILED_IMAGE_PULL),
        ([State.FAILED_UPSTREAM, State.FAILED_UPSTREAM], State.FAILED_UPSTREAM),
    ],
)
def test_a_workflow_stands_where_its_groups_do(groups, state):
    assert workflow_state(groups) is state


@given(st.lists(st.sampled_from(FINAL), min_size=1))
def test_a_workflow_fails_when_a_group_does(groups):
    state = workflow_state(groups)

    assert state.is_final
    assert state.is_failed == any(group.is_failed for group in groups)


@given(st.dictionaries(st.sampled_from("abcd"), states, min_size=1), st.booleans())
def test_a_group_has_ended_when_all_its_tasks_have(tasks, ignore_nonlead):
    state = group_state(tasks, next(iter(tasks)), ignore_nonlead=ignore_nonlead)

    assert state.is_final == all(task.is_final for task in tasks.values())


@pytest.mark.parametrize("name", ["workflow_started", "sweep_started"])
def test_a_record_names_the_start_of_its_owner_whatever_was_imported_before(name):
    stamped = parse({"time": "2026-01-01T00:00:00Z", "event": name})

    assert isinstance(stamped.event, StartedEvent)  # what `--notify` waits for


def test_a_group_without_a_result_has_no_outcome(tmp_path):
    assert read_outcome(RunDir(str(tmp_path)), "g") is None


def test_the_last_lines_of_a_workflow_name_the_versions_that_it_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_dir = RunDir(str(tmp_path))
    os.makedirs(run_dir.group("train").path)
    with open(run_dir.group("train").events, "w") as record:
        record.write(
            '{"time":"2026-01-01T00:00:00Z","event":"dataset_version","task":"a","version":"model:3"}\n'
        )

    left = describe_workflow_results(run_dir, ("train", "other"))

    assert left == "dataset model:3; outputs in tasks; logs in logs"
