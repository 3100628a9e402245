"""What workers print: never torn, never lost silently, never in the way."""

import os
import re
import shutil
import stat
import subprocess

import pytest

from kit.command import MUSTER, muster_env
from kit.namespaces import small_disk, why_no_mount
from kit.waiting import wait_until

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")


def test_a_hundred_megabytes_reach_the_log_and_not_the_agents_memory(job, tmp_path):
    gate = tmp_path / "gate"
    run = job().write(
        "import os, sys, time\n"
        "line = b'x' * 99 + b'\\n'\n"
        "for _ in range(1000):\n"
        "    sys.stdout.buffer.write(line * 1000)\n"
        "sys.stdout.flush()\n"
        "open(sys.argv[1], 'w').close()\n"
        "while not os.path.exists(sys.argv[1] + '.go'):\n"
        "    time.sleep(0.01)\n",
        str(gate),
    )
    run.options = ()
    run.start()
    wait_until(gate.exists, "the whole output", 120)
    wait_until(lambda: run.log().stat().st_size == 100_000_000, "the log", 60)
    with open(f"/proc/{run.agent_pid('n1')}/statm") as statm:
        assert int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") < 100 << 20
    (tmp_path / "gate.go").touch()
    assert run.wait() == 0
    assert run.stdout.count("\n") == 1_000_000


def test_lines_of_several_ranks_are_whole_and_prefixed(job):
    run = job("--nodes", "2", "--nproc-per-node", "2", "--tee", "all").write(
        "import os, sys\n"
        "rank = os.environ['RANK']\n"
        "for number in range(2000):\n"
        "    sys.stdout.write(f'{rank}:{number}:')\n"
        "    sys.stdout.flush()\n"
        "    sys.stdout.write('y' * 50 + '\\n')\n",
    )
    assert run.start().wait() == 0
    seen = {rank: [] for rank in "0123"}
    for line in run.stdout.splitlines():
        prefix, rank, number, rest = re.fullmatch(r"\[rank (\d)\] (\d):(\d+):(y+)", line).groups()
        assert rank == prefix
        assert rest == "y" * 50
        seen[rank].append(int(number))
    assert all(numbers == list(range(2000)) for numbers in seen.values())


def test_standard_streams_stay_apart(job):
    run = job().write("import sys\nprint('out')\nprint('err', file=sys.stderr)\n")
    run.options = ()
    assert run.start().wait() == 0
    assert run.stdout == "out\n"
    assert "err\n" in run.stderr
    assert sorted(run.log().read_text().splitlines()) == ["err", "out"]


def test_tee_none_shows_nothing_of_the_ranks(job):
    run = job("--tee", "none").write("print('out')\n")
    assert run.start().wait() == 0
    assert run.stdout == ""


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--nodes", "2", "--tee", "all"),
        ("run", "--nproc-per-node", "2", "--tee", "all"),
        ("torchrun", "--nproc-per-node", "2"),
    ],
    ids=" ".join,
)
def test_a_pipe_gets_every_line_and_a_reader_who_sleeps_holds_no_run(tmp_path, words):
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfor n in range(100_000):\n    print(os.environ['RANK'], n, 'z' * 60)\n"
    )
    with subprocess.Popen(
        [*MUSTER, *words, str(script)],
        env=muster_env(tmp_path / "home"), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, text=True,
    ) as client:  # fmt: skip
        # Nobody reads the pipe: the run must reach its end all the same.
        runs = tmp_path / "home" / "runs"
        wait_until(lambda: list(runs.glob("*/result.json")), "the result", 120)
        lines = client.stdout.read().splitlines()
        assert client.wait() == 0
    for rank in range(2):
        of_rank = [line for line in lines if line.startswith(f"[rank {rank}]")]
        assert of_rank == [f"[rank {rank}] {rank} {n} {'z' * 60}" for n in range(100_000)]
    assert len(lines) == 200_000
    assert not [*runs.glob("*/unread*"), *runs.glob("*/untold*")]


@pytest.mark.netns
def test_a_full_disk_loses_logs_is_said_and_the_job_goes_on(job, tmp_path):
    home = tmp_path / "small"
    home.mkdir()
    run = job("--tee", "none")
    run.write("for n in range(300_000):\n    print('w' * 60)\nprint('the end')\n").home = home
    # It ends with the run; the result is copied out.
    copy = f'"$@"; code=$?; cp -r "{home}/runs" "{tmp_path}/kept"; exit $code'
    run.prefix = (*small_disk(home, "6m"), "sh", "-c", copy, "sh")
    if (reason := why_no_mount()) is not None:
        pytest.skip(reason)
    run.start()
    assert run.wait() == 0, run.stderr
    assert "logs are being lost on n1: No space left on device; the job continues" in run.stderr
    assert "log lines lost" in run.stderr


def test_a_run_directory_that_becomes_read_only_does_not_stop_the_job(job):
    if os.geteuid() == 0:
        pytest.skip("root writes into read-only folders")
    run = job().start()
    run.wait_up(0)
    logs = run.run_dir / "logs/main/train"
    logs.chmod(0o500)
    try:
        run.order(1, "kill")
        run.wait_up(1)
        assert run.finish() == 0
        assert "logs are being lost" in run.stderr
    finally:
        logs.chmod(0o700)


def test_a_run_directory_that_is_removed_is_said_and_the_run_goes_on(job):
    run = job("--nodes", "1", "--nproc-per-node", "1").start()
    run.wait_up(0, num=1)
    folder = run.run_dir
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)  # a writer may have been quicker
    wait_until(lambda: f"{folder} has been removed" in run.stderr, "the line")
    assert run.finish() == 0
    assert not folder.exists() or stat.S_IMODE(folder.stat().st_mode) == 0o700
