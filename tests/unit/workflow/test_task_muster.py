"""`muster` as tasks have it: `barrier`, and words on the rest."""

import pytest

from torchmuster.errors import MusterError, UsageError
from torchmuster.workflow.task_call import main


@pytest.mark.parametrize("words", [["run", "train.py"], ["status"], []])
def test_other_commands_are_said_to_be_elsewhere(words):
    with pytest.raises(UsageError, match="there is no `muster") as caught:
        main(words)
    assert "muster barrier" in caught.value.why


@pytest.mark.parametrize("limit", ["0", "soon"])
def test_a_limit_that_is_none_is_refused(limit):
    with pytest.raises(UsageError, match="the limit is not a time above 0"):
        main(["barrier", "--timeout", limit])


def test_the_words_of_a_barrier_outside_of_a_workflow_are_taken_and_it_needs_a_task(monkeypatch):
    monkeypatch.delenv("TORCHMUSTER_TASK_SOCKET", raising=False)
    with pytest.raises(MusterError):
        main(["barrier", "--num_nodes", "2", "--connect", "host", "--rank", "1", "--port", "1"])
