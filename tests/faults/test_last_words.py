"""What the logs add to the last words of a failed run: the reason, its line, the cure; what the head saw stays first."""

import pytest

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")

TWO = ("--nodes", "2", "--nproc-per-node", "1", "--max-restarts", "0")


def last_words(job, tmp_path, text):
    script = tmp_path / "train.py"
    script.write_text(text)
    run = job(*TWO, script=(str(script),)).start()
    assert run.wait() != 0
    return run.stderr.partition("\nerror: ")[2]


def test_exit_code_gets_the_reason_from_the_log_with_file_and_line(job, tmp_path):
    said = last_words(
        job,
        tmp_path,
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


def test_error_of_a_victim_gets_the_reason_of_the_rank_that_left(job, tmp_path):
    said = last_words(
        job,
        tmp_path,
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


def test_script_that_calls_a_store_of_its_own_is_told_which_one_there_is(job, tmp_path):
    said = last_words(
        job,
        tmp_path,
        "import datetime, os, torch.distributed as dist\n"
        "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:9', world_size=2,\n"
        "    rank=int(os.environ['RANK']), timeout=datetime.timedelta(seconds=1))\n",
    )
    assert "DistNetworkError" in said.partition("\n")[0]
    assert "the script calls a store at 127.0.0.1:9; the launcher's is at 127.0.0.1:" in said
    assert 'init_method "env://"' in said


def test_exception_that_says_all_itself_gets_no_second_reason(job, tmp_path):
    said = last_words(
        job, tmp_path, "print('No space left on device', flush=True)\nraise ValueError('bad label')"
    )
    assert said.startswith("rank")
    assert "because: Traceback" in said
    assert "disk is full" not in said
