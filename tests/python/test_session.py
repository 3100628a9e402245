"""Sessions from Python: nodes are held in a `with`, and calls start on them by a fork."""

import asyncio
import functools
import json
import os
from pathlib import Path

import pytest

import torchmuster
from kit.waiting import wait_until

LIMIT_S = 120.0


@pytest.fixture
def held(project):
    with torchmuster.session(nodes=2, nproc_per_node=2) as session:
        yield session
    assert torchmuster.sessions() == []


def test_closures_and_scripts_run_on_the_nodes_of_a_session(project, held):
    factor = 7

    def work(x):
        import sys

        return x * factor, "torch" in sys.modules, int(os.environ["RANK"])

    assert torchmuster.sessions()[0].name == held.name
    assert held.launch(work, 6).results(LIMIT_S) == [(42, True, rank) for rank in range(4)]
    (project / "train.py").write_text("import sys; print(sys.argv[1:])\n")
    run = held.run("train.py", "--lr", 0.1, env={"A": "1"}).wait(LIMIT_S)
    assert run.logs(3) == "['--lr', '0.1']\n"
    # The other way, in a process of its own.
    other = torchmuster.launch(work, 2, session=held.name, nodes=1)
    assert other.results(LIMIT_S) == [(14, True, 0), (14, True, 1)]
    assert torchmuster.runs()[0] == other
    assert len(torchmuster.runs()) == 3  # the session is none
    plans = [json.loads(Path(one.path, "plan.json").read_text()) for one in torchmuster.runs()]
    assert {plan["session"] for plan in plans} == {held.name}


def test_what_the_folder_and_the_variables_are_at_a_call_counts(project, held, monkeypatch):
    (project / "inner").mkdir()
    monkeypatch.chdir(project / "inner")
    monkeypatch.setenv("OF_THE_CALL", "yes")

    def look():
        return os.getcwd(), os.environ.get("OF_THE_CALL")

    assert held.launch(look, nodes=1, nproc_per_node=1).results(LIMIT_S) == [
        (str(project / "inner"), "yes")
    ]


def test_a_function_fails_in_a_session_is_fixed_and_runs_again(held):
    def work(x):
        raise ValueError(f"bad batch {x}")

    with pytest.raises(torchmuster.RunFailed, match="bad batch 6"):
        held.launch(work, 6, max_restarts=0).results(LIMIT_S)

    def work(x):
        return x

    assert held.launch(work, 6).results(LIMIT_S) == [6] * 4


def test_errors_are_those_of_launch(held):
    refused = functools.partial(pytest.raises, torchmuster.NotLaunchedError)
    with refused(match=r"nope\.py"):
        held.run("nope.py")
    with refused(match=r"the session .* has 2 nodes"):
        held.launch(os.getpid, nodes=3)
    with refused(match=r"is .* already"):
        held.launch(os.getpid, session="main")
    with refused(match="has no parameter `nodse`"):
        torchmuster.session(nodse=2)
    with refused(match="`soon` is not a valid duration"):
        torchmuster.session(idle="soon")
    with refused(match=r"(?s)is not in the range.*at: nodes=0") as no:
        torchmuster.session(nodes=0)
    assert "muster session" not in str(no.value)
    with refused(match=r"^`a/b c` is not a .*\n  at: name='a/b c'"):
        torchmuster.session(name="a/b c")
    with refused(match="there is a session"):
        torchmuster.session(name=held.name)


def test_the_end_of_a_with_ends_what_is_still_in_the_session(project):
    def wait():
        import time

        Path("begun").touch()
        time.sleep(600)

    with torchmuster.session() as held:
        run = held.launch(wait)
        wait_until((project / "begun").exists, "the function to begin", LIMIT_S)

    assert run.status().state == "cancelled"
    assert torchmuster.sessions() == []
    held.end()  # again
    with pytest.raises(torchmuster.NotLaunchedError, match="has ended"):
        held.launch(wait)


def test_event_loops_await_follow_and_cancel_and_go_on(held, capsys):
    def work(x):
        print("line", x, flush=True)
        return x

    def endless():
        import time

        time.sleep(600)

    async def all_of_it():
        turns = []

        async def count():
            while True:
                turns.append(1)
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        run = held.launch(work, 3, nodes=1, nproc_per_node=1)
        assert await run is run
        assert await run.follow_async() is run
        assert await run.results_async() == [3]
        run = held.launch(endless, nodes=1, nproc_per_node=1)
        before = len(turns)
        await run.cancel_async(at_once=True)
        assert len(turns) > before  # the loop went on meanwhile
        with pytest.raises(torchmuster.RunFailed, match="cancel"):
            await run
        counting.cancel()

    asyncio.run(all_of_it())
    assert "line 3\n" in capsys.readouterr().out
