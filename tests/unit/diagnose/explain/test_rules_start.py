"""What a node lacked before any training."""

import pytest

from unit.diagnose.explain.logs import cause_of, traceback_of


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("bash: /v/bin/torchrun: /v/bin/python3: bad interpreter: Permission denied", "permission"),
        ("/var/spool/job1/slurm_script: line 12: ./run.sh: Permission denied", "permission"),
        ("python: can't open file '/p/train.py': [Errno 13] Permission denied", "permission"),
        ("bash: ./t: /v/bin/python3: bad interpreter: No such file or directory", "command-missing"),
        ("bash: line 1: ./t: cannot execute: required file not found", "command-missing"),
        ("zsh: command not found: torchrun", "command-missing"),
        ('exec: "torchrun": executable file not found in $PATH: unknown', "command-missing"),
        ("[proxy:0:0@n1] execvp error on file torchrun (No such file or directory)", "command-missing"),
        ("python: can't open file '/p/train.py': [Errno 2] No such file or directory", "script-missing"),
    ],
)  # fmt: skip
def test_what_can_not_be_run_is_told_from_what_is_not_there(tmp_path, line, cause):
    assert cause_of(tmp_path, job=f"loading\n{line}\n") == cause


@pytest.mark.parametrize(
    ("why", "cause"),
    [
        ("cannot import name 'f' from 'model' (/home/u/model.py)", "exception"),
        ("cannot import name 'f' from partially initialized module 'm' (most likely due to a circular import) (/home/u/m.py)", "exception"),
        ("attempted relative import with no known parent package", "exception"),
        ("cannot import name 'f' from 'x' (/v/lib/python3.11/site-packages/x/__init__.py)", "package-missing"),
    ],
)  # fmt: skip
def test_name_that_the_user_s_own_file_lacks_is_no_missing_package(tmp_path, why, cause):
    assert cause_of(tmp_path, job=traceback_of(f"ImportError: {why}")) == cause
