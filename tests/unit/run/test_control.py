import os

import pytest

from torchmuster.errors import NotFoundError
from torchmuster.files.layout import RunDir
from torchmuster.run.control import log_files
from torchmuster.run.find import view_run


@pytest.fixture
def view(tmp_path):
    run_dir = RunDir(str(tmp_path / "r"))
    for attempt in (0, 2, 10):
        os.makedirs(run_dir.attempt_logs(attempt))
        for rank in range(attempt + 1):
            with open(run_dir.rank_log(attempt, rank), "w"):
                pass
    return view_run(run_dir)


def test_the_last_attempt_is_meant_unless_another_is_named(view):
    assert log_files(view, None, 10) == [view.run_dir.rank_log(10, 10)]


def test_ranks_come_in_the_order_of_their_numbers(view):
    assert log_files(view, 10, None) == [view.run_dir.rank_log(10, rank) for rank in range(11)]


def test_an_attempt_that_never_was_is_refused_with_those_that_were(view):
    with pytest.raises(NotFoundError, match="no attempt 1") as caught:
        log_files(view, 1, None)
    assert caught.value.why == "it has attempts 0,2,10"


def test_a_rank_without_a_log_is_refused_with_those_that_have_one(view):
    with pytest.raises(NotFoundError, match="no log of rank 3") as caught:
        log_files(view, 2, 3)
    assert caught.value.why == "it has logs of ranks 0-2"
