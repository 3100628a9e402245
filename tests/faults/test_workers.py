"""What a run survives on the side of its workers: 2 nodes x 2 workers, real processes. And what its last words are."""

import signal

import pytest

from kit.waiting import wait_until
from torchmuster.core import proc

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")


@pytest.mark.parametrize(
    ("word", "rank", "what"),
    [
        ("kill", 3, "SIGKILL in rank 3 on n2"),
        ("kill", 0, "SIGKILL in rank 0 on n1"),
        ("segv", 1, "SIGSEGV in rank 1 on n1"),
        ("raise", 2, "ValueError: bad batch in rank 2 on n2"),
        ("exit", 0, "exit code 3 in rank 0 on n1"),
    ],
)
def test_next_attempt_starts_on_all_nodes_from_spawners_that_have_torch(job, word, rank, what):
    """How soon is measured by `benchmarks/launch.py`."""
    run = job().start()
    first = run.wait_up(0)
    spawners = [run.spawner_pid("n1"), run.spawner_pid("n2")]
    run.order(rank, word)
    second = run.wait_up(1)
    assert set(second) == {0, 1, 2, 3}
    assert [run.spawner_pid("n1"), run.spawner_pid("n2")] == spawners
    assert not any(proc.is_running(pid) for pid, _ in first.values())
    assert run.finish() == 0
    failed = run.events("attempt_failed")
    assert [f["what"] for f in failed] == [what]
    assert not run.events("node_lost")  # and no lease was waited for
    assert run.result()["restarts_spent"] == 1


def test_signals_never_count_as_the_same_bug_and_all_restarts_are_spent(job):
    run = job("--nodes", "2", "--nproc-per-node", "2", "--max-restarts", "2").start()
    for attempt in range(3):
        run.wait_up(attempt)
        run.order(2, "kill")
    assert run.wait() == 128 + signal.SIGKILL
    assert len(run.events("attempt_failed")) == 3
    assert "error: rank 2 was ended by SIGKILL" in run.stderr
    assert "rank 2 of 4 on n2, attempt 2" in run.stderr
    assert "retries: all 2 spent" in run.stderr
    assert run.result()["report"]["error"] == "rank 2 was ended by SIGKILL"


def test_the_same_exception_from_the_same_line_is_not_tried_a_third_time(job):
    run = job().write("import torch\n\nbatch = [1]\nprint(batch[2])\n").start()
    assert run.wait() == 1
    assert len(run.events("attempt_started")) == 2
    assert "raised IndexError: list index out of range" in run.stderr
    assert f"at: {run.script[0]}:4, rank " in run.stderr
    assert "attempts 0 and 1 failed in the same place" in run.stderr


def test_the_same_exit_code_twice_within_five_seconds_is_not_tried_a_third_time(job):
    run = job().write("import os\n\nif os.environ['RANK'] == '1':\n    os._exit(9)\n").start()
    assert run.wait() == 9
    assert len(run.events("attempt_started")) == 2
    assert "error: rank 1 ended with exit code 9" in run.stderr


def test_an_early_end_is_said_and_named_as_the_cause(job):
    run = job("--nodes", "2", "--nproc-per-node", "2", "--max-restarts", "0").start()
    run.wait_up(0)
    run.order(1, "zero")
    assert run.wait() == 1
    assert "error: rank 1 ended with exit code 0 while rank" in run.stderr
    assert "the likely cause" in run.stderr


def test_a_rank_that_leaves_early_without_harm_is_said_while_the_others_run(job, tmp_path):
    gate = tmp_path / "gate"
    run = job().write(
        "import os, sys, time\n"
        "while os.environ['RANK'] != '2' and not os.path.exists(sys.argv[1]):\n"
        "    time.sleep(0.01)\n",
        str(gate),
    )
    run.start().wait_event("early_end")  # nothing else happens before the gate opens
    wait_until(lambda: "rank 2 ended with exit code 0 while 3 others run" in run.stderr, "the line")
    gate.touch()
    assert run.wait() == 0


def test_code_75_is_a_preemption_and_spends_no_restart(job):
    run = job("--nodes", "2", "--nproc-per-node", "2", "--max-restarts", "0").start()
    run.wait_up(0)
    for rank in range(4):
        run.order(rank, "preempted")
    run.wait_up(1)
    assert run.finish() == 0
    result = run.result()
    assert (result["attempts"], result["restarts_spent"]) == (2, 0)
    assert "was preempted (exit code 75)" in run.stderr


def test_a_kill_for_want_of_memory_is_told_with_the_kernels_evidence(job, memory_cgroup):
    run = job("--nproc-per-node", "2", "--max-restarts", "0").write(
        "import os\n"
        "hoard = []\n"
        "while os.environ['RANK'] == '1':\n"
        "    hoard.append(bytearray(32 << 20))\n"
        "    hoard[-1][::4096] = b'x' * len(hoard[-1][::4096])\n"
    )
    run.env["OPENBLAS_NUM_THREADS"] = "1"
    memory_cgroup(run)
    assert run.wait(120) == 137
    assert "rank 1 was ended by SIGKILL because memory ran out" in run.stderr
    assert "hint: lower the batch size" in run.stderr


def test_what_a_worker_started_is_gone_with_its_attempt(job):
    run = job().start()
    run.wait_up(0)
    run.order(3, "child")

    def sleepers():
        found = []
        for pid in run.all_pids():
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
                    if cmdline.read() == b"sleep\x00987654\x00":
                        found.append(pid)
            except OSError:
                continue
        return found

    (sleeper,) = wait_until(sleepers, "the worker's child")
    run.order(0, "kill")
    run.wait_up(1)
    assert not proc.is_running(sleeper)
    assert run.finish() == 0


# What the logs add to the last words of a failed run: the reason, its line, the cure; what the head saw stays first.

TWO = ("--nodes", "2", "--nproc-per-node", "1", "--max-restarts", "0")


def last_words(job, text):
    run = job(*TWO).write(text).start()
    assert run.wait() != 0
    return run.stderr.partition("\nerror: ")[2]


def test_exit_code_gets_the_reason_from_the_log_with_file_and_line(job):
    said = last_words(
        job,
        "import os, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('step 1', file=sys.stderr)\n"
        "    print('cp: error writing /scratch/x: No space left on device', file=sys.stderr)\n"
        "    sys.stderr.flush()\n"
        "    os._exit(3)\n",
    )
    assert said.startswith("rank 1 ended with exit code 3: cp: error writing /scratch/x: No space")
    assert "because: the disk is full" in said
    assert "rank-1.log:2: cp: error writing" in said
    assert "hint: make room" in said


def test_error_of_a_victim_gets_the_reason_of_the_rank_that_left(job):
    said = last_words(
        job,
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB', flush=True)\n"
        "    os._exit(0)\n"
        "dist.all_reduce(torch.ones(1))\n",
    )
    assert said.startswith("rank 1 ended with exit code 0 while rank 0 still needed it\n")
    assert "rank-1.log:1: torch.OutOfMemoryError" in said


def test_script_that_calls_a_store_of_its_own_is_told_which_one_there_is(job):
    said = last_words(
        job,
        "import datetime, os, torch.distributed as dist\n"
        "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:9', world_size=2,\n"
        "    rank=int(os.environ['RANK']), timeout=datetime.timedelta(seconds=1))\n",
    )
    assert "DistNetworkError" in said.partition("\n")[0]
    assert "the script calls a store at 127.0.0.1:9; the launcher's is at 127.0.0.1:" in said
    assert 'init_method "env://"' in said


def test_exception_that_says_all_itself_gets_no_second_reason(job):
    said = last_words(
        job, "print('No space left on device', flush=True)\nraise ValueError('bad label')"
    )
    assert said.startswith("rank")
    assert "because: Traceback" in said
    assert "disk is full" not in said
