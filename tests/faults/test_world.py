"""Who gets which rank, which GPUs and which environment."""

import json
import os
import signal
import subprocess

import pytest

from kit.command import MUSTER, muster_env
from kit.waiting import wait_until

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")

TELL = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
print(json.dumps({name: os.environ.get(name) for name in names}))
"""


def told(run, num):
    """Return what the ranks of attempt 0 have printed, in the order of the ranks."""
    return [json.loads(run.log(rank).read_text()) for rank in range(num)]


def test_nodes_of_different_size_get_consecutive_ranks(job):
    run = job("--nodes", "2", "--nproc-per-node", "3,1").write(TELL).start()
    assert run.wait() == 0
    facts = told(run, 4)
    assert [f["RANK"] for f in facts] == ["0", "1", "2", "3"]
    assert [f["LOCAL_RANK"] for f in facts] == ["0", "1", "2", "0"]
    assert [f["GROUP_RANK"] for f in facts] == ["0", "0", "0", "1"]
    assert [f["LOCAL_WORLD_SIZE"] for f in facts] == ["3", "3", "3", "1"]


def test_simulated_nodes_get_gpus_of_their_own(job):
    run = job("--nodes", "2", "--nproc-per-node", "1,2").write(TELL)
    run.env["CUDA_VISIBLE_DEVICES"] = "7,GPU-b,5"
    run.start()
    assert run.wait() == 0
    assert [f["CUDA_VISIBLE_DEVICES"] for f in told(run, 3)] == ["7", "GPU-b,5", "GPU-b,5"]


def test_virtual_local_rank_shows_each_worker_one_gpu(job):
    options = ("--standalone", "--nproc-per-node", "2", "--virtual-local-rank")
    run = job(*options, command="torchrun").write(TELL)
    run.env["CUDA_VISIBLE_DEVICES"] = "3,4"
    run.start()
    assert run.wait() == 0
    facts = told(run, 2)
    assert [f["LOCAL_RANK"] for f in facts] == ["0", "0"]
    assert [f["CUDA_VISIBLE_DEVICES"] for f in facts] == ["3", "4"]


def test_an_elastic_run_starts_with_the_nodes_that_came_by_the_last_call(job, port):
    run = job(
        "--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}",
        "--rdzv-conf", "last_call_timeout=1", command="torchrun",
    ).start()  # fmt: skip
    run.wait_up(0, num=1)
    assert run.world(0) == 1
    assert run.finish() == 0


def test_log_dir_gets_the_streams_that_were_named_in_torchruns_layout(job, tmp_path):
    folder = tmp_path / "kept"
    options = ("--standalone", "--nproc-per-node", "1", "--log-dir", str(folder))
    run = job(*options, "-r", "1", "-t", "2", command="torchrun")
    run.write("import sys\nprint('out')\nprint('err', file=sys.stderr)\n")
    assert run.start().wait() == 0
    assert run.stdout == ""  # redirected
    assert "err" in run.stderr  # teed
    (out,) = folder.glob("*_*/attempt_0/0/stdout.log")
    (err,) = folder.glob("*_*/attempt_0/0/stderr.log")
    assert (out.read_text(), err.read_text()) == ("out\n", "err\n")


def test_the_arguments_local_rank_macro_is_replaced_under_torchrun(job):
    run = job("--standalone", "--nproc-per-node", "2", command="torchrun")
    run.write("import sys\nprint(sys.argv[1])\n", "shard-${local_rank}")
    assert run.start().wait() == 0
    assert sorted(run.stdout.splitlines()) == ["[rank 0] shard-0", "[rank 1] shard-1"]


def test_no_python_executes_a_command_as_it_is(job):
    run = job("--standalone", "--no-python", command="torchrun", script=("echo", "hello")).start()
    assert run.wait() == 0
    assert run.stdout == "hello\n"


def test_under_torchrun_a_failure_exits_with_1_and_says_what_restarts_would_do(job):
    run = job("--standalone", command="torchrun").write("import sys\nsys.exit(7)\n")
    assert run.start().wait() == 1
    assert "rank 0 ended with exit code 7" in run.stderr
    assert "`--max-restarts 3` starts all workers again" in run.stderr


def test_logs_f_shows_what_is_written_until_the_run_ends(job):
    run = job().start()
    run.wait_up(0)
    follower = subprocess.Popen(
        [*MUSTER, "logs", "last", "-f", "--rank", "3"],
        env=muster_env(run.home), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert follower.stdout.readline() == "rank 3 is up\n"
        os.kill(run.up(0)[1][0], signal.SIGKILL)
        run.wait_up(1)
        wait_until(lambda: "is up" in follower.stdout.readline(), "the next attempt's line", 20)
        assert run.finish() == 0
        assert follower.wait(60) == 0
    finally:
        follower.kill()
        follower.stdout.close()
        follower.wait()
