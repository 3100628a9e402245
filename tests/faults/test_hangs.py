"""A rank that stands while the others wait is found, named and ended; slow ones are not. Nor is a start that only takes long."""

import re
import shutil
from pathlib import Path

import pytest

from kit import missing
from kit.command import SOURCE, muster_env, run_muster
from kit.waiting import wait_until

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")
WATCHED = str(Path(__file__).with_name("watched.py"))
BLIND = str(Path(__file__).with_name("watched_blind.py"))
LIMIT_S = 120.0
COMPILE_LIMIT_S = 300.0  # a compiler on a busy machine


@pytest.fixture
def train(job):
    """Return a function that starts a watched training."""

    def start(mode, *, nodes=1, workers=2, limit="8s", restarts=0, script=WATCHED, **env):
        options = ("--nodes", str(nodes), "--nproc-per-node", str(workers), "--tee", "none")
        more = ("--max-restarts", str(restarts), "--hang-timeout", limit)
        return job(*options, *more, script=(script, mode), env=env).start()

    return start


def ask(run, *words):
    """Run a command of ours that speaks to the run."""
    return run_muster(*words, env=muster_env(run.home), limit_s=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "headline", "place"),
    [
        ("data", r"rank 1 stood still for \d+ s while 2 ranks waited in backward", "read"),
        ("stop", r"rank 1 was stopped \(SIGSTOP\) for \d+ s while 2 ranks waited in", None),
        pytest.param(
            "branch",
            r"rank 1 waited in barrier for \d+ s while 2 ranks waited in backward",
            "odd",
            marks=pytest.mark.lab,
        ),
    ],
)
def test_the_rank_that_stands_is_named_as_the_cause(train, mode, headline, place):
    run = train(mode, workers=3)
    assert run.wait(LIMIT_S) == 1
    report = run.result()["report"]
    assert re.match(headline, report["error"])
    assert "rank 1 of 3 on n1" in report["at"]
    if place is not None:
        assert re.search(rf"watched\.py:\d+ in {place}\b", report["at"])
    assert "--hang-timeout" in report["hint"]
    warned, *_, ended = run.events("hang")
    assert not warned["ended"]
    assert ended["ended"]
    assert run.result()["cause"]["kind"] == "hang"
    assert "watched.py" in Path(ended["stacks"]).read_text()


@pytest.mark.slow
@pytest.mark.lab
def test_a_hang_without_the_library_is_found_by_stacks_and_processor_time(train):
    run = train("data", nodes=2, workers=1, script=BLIND)
    assert run.wait(LIMIT_S) == 1
    error = run.result()["report"]["error"]
    assert re.match(r"rank 1 stood still for \d+ s while 1 rank waited in all_reduce", error)
    assert "rank 1 of 2 on n2" in run.result()["report"]["at"]


@pytest.mark.slow
def test_a_hang_counts_as_a_failure_and_all_workers_start_again(train):
    run = train("data", limit="6s", restarts=1)
    second = wait_until(lambda: run.events("workers_started")[1:], "a second attempt", LIMIT_S)
    assert second[0]["attempt"] == 1
    assert "rank 1 stood still" in run.events("attempt_failed")[0]["what"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["evaluate", "save", "busy", "first"])
@pytest.mark.lab
def test_what_may_take_long_is_no_hang(train, mode):
    # Longer than 10 of the steps that a busy machine makes of 10 ms: else nothing could be told of.
    run = train(mode, limit="3s:10m", LONG_S="30", STEPS="200")
    assert run.wait(LIMIT_S) == 0, run.stderr
    assert run.events("hang") == []


@pytest.mark.slow
@pytest.mark.lab
def test_who_sits_in_a_debugger_is_no_hang_for_longer_than_the_most(train):
    run = train("breakpoint", limit="3s:6s", LONG_S="20", STEPS="200")
    assert run.wait(LIMIT_S) == 0, run.stderr
    assert run.events("hang") == []
    assert "(Pdb)" in run.log(1).read_text()


@pytest.mark.slow
@pytest.mark.lab
def test_a_compiler_that_takes_long_is_no_hang(train, tmp_path):
    slow, mark = tmp_path / "slow-g++", tmp_path / "has-waited"
    # As on a slow file system: the rank itself does nothing meanwhile.
    slow.write_text(f'#!/bin/sh\nmkdir {mark} 2>/dev/null && sleep 40\nexec {_compiler()} "$@"\n')
    slow.chmod(0o700)
    run = train(
        "compile",
        limit="3s:10m",
        STEPS="200",
        CXX=str(slow),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert run.wait(COMPILE_LIMIT_S) == 0, run.stderr
    assert mark.is_dir()
    assert run.events("hang") == []


@pytest.mark.slow
@pytest.mark.lab
def test_real_compilation_is_no_hang(train, tmp_path):
    _compiler()
    cache = str(tmp_path / "cache")
    run = train(
        "compile-on", limit="3s:10m", LONG_S="12", STEPS="200", TORCHINDUCTOR_CACHE_DIR=cache
    )
    assert run.wait(COMPILE_LIMIT_S) == 0, run.stderr
    assert run.events("hang") == []


def _compiler():
    """Return the path of g++; torch.compile needs it on processors."""
    return shutil.which("g++") or missing.stop("torch.compile needs g++")


@pytest.mark.slow
@pytest.mark.lab
def test_a_rank_that_became_another_program_is_shown_by_py_spy_or_said_to_need_it(train):
    run = train("again", nodes=1, workers=2, limit="off", script=BLIND)
    word = "read (" if shutil.which("py-spy") else "pip install py-spy"
    wait_until(lambda: word in ask(run, "stacks", "last").stdout, word, LIMIT_S)


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.parametrize(
    ("mode", "part"), [("straggler", "data"), ("slow backward", "after forward")]
)
def test_a_slow_rank_is_named_with_what_is_slow(train, mode, part):
    run = train(mode, limit="60s", STEPS="400")
    event = run.wait_event("straggler", timeout_s=LIMIT_S)
    assert (event["rank"], event["part"]) == (1, part)
    assert re.match(
        rf"rank 1 on n1 is \d+ % slower than the others for \d+ steps: {part}", event["text"]
    )


@pytest.mark.slow
def test_stacks_and_commands_reach_the_ranks_of_a_running_run(train):
    run = train("data", nodes=2, workers=1, limit="off")
    words = ("rank 0 waits in backward (watched.py", "rank 1 on n2 is in read() (watched.py")
    wait_until(lambda: _says(run, words), "one that waits and one that reads", LIMIT_S)
    words = ("exec", "last", "--rank", "1", "--", "sh", "-c", "echo $RANK $WORLD_SIZE; exit 3")
    done = ask(run, *words)
    assert (done.stdout, done.returncode) == ("1 2\n", 3)
    done = ask(run, "exec", "last", "--node", "n2", "--", "sh", "-c", "echo ${RANK:-none}")
    assert done.stdout == "none\n"
    done = ask(run, "exec", "last", "--rank", "9", "--", "true")
    assert "has no rank 9" in done.stderr
    assert "ranks 0 to 1" in done.stderr
    assert run.events("hang") == []


def _says(run, words):
    """Say whether the first line of `muster stacks` holds all of these words."""
    first = ask(run, "stacks", "last").stdout.partition("\n")[0]
    return all(word in first for word in words)


def test_debug_gives_nccl_a_file_for_each_rank_and_keeps_what_the_user_has_set(job):
    names = "NCCL_DEBUG NCCL_DEBUG_FILE TORCH_DISTRIBUTED_DEBUG TORCH_CPP_LOG_LEVEL"
    run = job("--nproc-per-node", "2", "--debug", env={"NCCL_DEBUG": "WARN"})
    run.write(f"import os\nprint([os.environ[n] for n in {names.split()!r}])\n")
    assert run.start().wait() == 0, run.stderr
    for rank in range(2):
        file = f"{run.log().parent}/nccl-{rank}.log"
        assert f"['WARN', '{file}', 'DETAIL', 'INFO']" in run.log(rank).read_text()


# Ranks that wait for others at the start of training are told of in seconds.

MEETS = str(Path(__file__).with_name("meets.py"))
START_LIMIT_S = 180.0


@pytest.fixture
def meet(job):
    """Return a function that starts ranks that meet; a wait is told of after 4 s."""

    def start(mode, *options, nodes=2, workers=1, limit="24s:10m", **env):
        words = ("--nodes", str(nodes), "--nproc-per-node", str(workers), "--tee", "none")
        made = job(*words, "--hang-timeout", limit, *options, script=(MEETS, mode), env=env)
        return made.start()

    return start


def told(run):
    return run.wait_event("start_wait", timeout_s=START_LIMIT_S)["text"]


def test_ranks_that_wait_for_one_are_told_of_with_its_place_and_go_on_when_it_comes(meet, tmp_path):
    data = tmp_path / "data"
    run = meet("download", workers=2, DATA=str(data))
    assert re.fullmatch(
        r"ranks 1-3 wait in init_process_group \(meets\.py:\d+\) since \d+ s"
        r" for rank 0 on n1, which is in download\(\) \(meets\.py:\d+\)",
        told(run),
    )
    data.touch()
    assert run.wait(START_LIMIT_S) == 0, run.stderr
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
    assert run.wait(START_LIMIT_S) == 0, run.stderr
    assert run.events("start_wait") == []
