"""`launch(function, inline=True)`: a call in this process, as rank 0 of 1."""

import asyncio
import os

import pytest

import torchmuster
from torchmuster.errors import NotFoundError
from torchmuster.launcher.api.failures import NotLaunchedError


def world(*more, **named):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "COLOUR")
    return os.getpid(), {name: os.environ.get(name) for name in names}, more, named


def fail():
    raise ZeroDivisionError("mine")


def test_the_function_runs_here_with_a_world_of_one_which_is_gone_after(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    run = torchmuster.launch(world, 1, lr=0.1, inline=True, env={"COLOUR": "red"}, nodes=1)

    ((pid, seen, more, named),) = run.results()
    assert pid == os.getpid()
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["COLOUR"]) == ("0", "1", "red")
    assert seen["MASTER_ADDR"] == "127.0.0.1"
    assert (more, named) == ((1,), {"lr": 0.1})
    assert os.environ["RANK"] == "7"
    assert "WORLD_SIZE" not in os.environ


def test_what_the_function_raises_is_raised_here_with_its_own_frames():
    with pytest.raises(ZeroDivisionError) as error:
        torchmuster.launch(fail, inline=True)
    assert error.traceback[-1].name == "fail"


def test_it_answers_as_a_run_that_has_ended():
    run = torchmuster.launch(world, inline=True)
    assert run.wait() is run
    assert run.follow() is run
    assert asyncio.run(run.results_async()) == run.results()
    assert asyncio.run(run.wait_async()) is run
    assert (run.status().state, run.status().exit_code) == ("succeeded", 0)
    run.cancel()
    with pytest.raises(NotFoundError):
        run.logs()


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"nodes": 2}, ["nodes"]),
        ({"on": "slurm", "nproc_per_node": 4}, ["on", "nproc_per_node"]),
        ({"hang_timeout": "5s"}, ["hang_timeout"]),
    ],
)
def test_what_needs_more_than_this_process_is_refused_all_at_once(options, where):
    with pytest.raises(NotLaunchedError) as error:
        torchmuster.launch(world, inline=True, **options)
    found = [error.value, *error.value.others]
    assert [one.where for one in found] == [f"launch({key}=...)" for key in where]


def test_a_script_and_a_misspelt_keyword_are_refused():
    with pytest.raises(NotLaunchedError) as error:
        torchmuster.launch("train.py", inline=True)
    assert error.value.fix == "muster run --inline train.py"
    with pytest.raises(NotLaunchedError, match="has a parameter `lrr`"):
        torchmuster.launch(fail, lrr=1, inline=True)
