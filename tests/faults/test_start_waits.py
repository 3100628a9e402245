"""Ranks that wait for others at the start of training are told of in seconds; a start that only takes long is not."""

import re
from pathlib import Path

import pytest

from kit.command import SOURCE

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")
MEETS = str(Path(__file__).with_name("meets.py"))
LIMIT_S = 180.0


@pytest.fixture
def meet(job):
    """Return a function that starts ranks that meet; a wait is told of after 4 s."""

    def start(mode, *options, nodes=2, workers=1, limit="24s:10m", **env):
        words = ("--nodes", str(nodes), "--nproc-per-node", str(workers), "--tee", "none")
        made = job(*words, "--hang-timeout", limit, *options, script=(MEETS, mode), env=env)
        return made.start()

    return start


def told(run):
    return run.wait_event("start_wait", timeout_s=LIMIT_S)["text"]


def test_ranks_that_wait_for_one_are_told_of_with_its_place_and_go_on_when_it_comes(meet, tmp_path):
    data = tmp_path / "data"
    run = meet("download", workers=2, DATA=str(data))
    assert re.fullmatch(
        r"ranks 1-3 wait in init_process_group \(meets\.py:\d+\) since \d+ s"
        r" for rank 0 on n1, which is in download\(\) \(meets\.py:\d+\)",
        told(run),
    )
    data.touch()
    assert run.wait(LIMIT_S) == 0, run.stderr
    assert len(run.events("start_wait")) == 1
    assert "muster: ranks 1-3 wait in init_process_group" in run.stderr


@pytest.mark.lab
@pytest.mark.parametrize("start", ["fork", "fresh"])
def test_a_script_that_calls_another_store_is_told_both_addresses_and_its_line(meet, start):
    text = told(meet("port", "--start", start))
    assert re.search(r"ranks 0-1 wait in init_process_group \(meets\.py:\d+\) since \d+ s", text)
    assert re.search(r"ranks 0-1 call [\w.:]+:1, where no store answers", text)
    assert re.search(
        r"the store of this run is at [\d.]+:\d{4,5} \(MASTER_ADDR, MASTER_PORT\)", text
    )
    assert re.search(r'`meets\.py:\d+: os\.environ\["MASTER_PORT"\] = "1"`', text)


@pytest.mark.lab
def test_a_store_that_the_script_opens_itself_is_a_wait_too(meet):
    text = told(meet("own-store"))
    assert "wait in TCPStore (meets.py" in text
    assert "127.0.0.1:1, where no store answers" in text


@pytest.mark.lab
def test_a_wrong_world_size_is_told_of_as_a_wait_of_all(meet):
    text = told(meet("world"))
    assert "though all of this attempt have come; do rank= and world_size=" in text


@pytest.mark.lab
@pytest.mark.parametrize(("mode", "name"), [("library", "download"), ("loop", "count")])
def test_who_keeps_the_others_waiting_is_named_with_its_function(meet, mode, name):
    text = told(meet(mode))
    assert "rank 1 waits in init_process_group (meets.py:" in text
    assert f"for rank 0 on n1, which is in {name}() (meets.py:" in text


@pytest.mark.lab
def test_a_slow_import_is_not_told_of(meet, tmp_path):
    library = tmp_path / "site-packages" / "slow_library.py"
    library.parent.mkdir()
    library.write_text("import threading\nthreading.Event().wait(14)\n")
    run = meet("import", PYTHONPATH=f"{library.parent}:{SOURCE}")
    assert run.wait(LIMIT_S) == 0, run.stderr
    assert run.events("start_wait") == []
