"""`muster run --inline`: the script in the very process of the command, as rank 0 of 1."""

import os
import sys

import pytest

from kit.command import MUSTER, ran

LIMIT_S = 120


@pytest.fixture
def run(tmp_path):
    def do(text, *words, stdin="", options=(), before=()):
        script = tmp_path / "folder" / "x.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(text)
        env = {**os.environ, "MUSTER_HOME": str(tmp_path / "home"), "MUSTER_ON": "local"}
        argv = [*(before or MUSTER), "run", "--inline", *options, str(script), *words]
        return ran(argv, limit_s=LIMIT_S, env=env, input=stdin)

    return do


def test_the_script_is_main_with_its_arguments_its_folder_and_a_world_of_one(run, tmp_path):
    text = (
        "import os, sys\nprint(__name__, sys.argv[1:], sys.path[0] == os.path.dirname(__file__))\n"
        "print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'A')))\n"
        "print(sys.modules['__main__'].__file__ == __file__, sys.stdin.read())\n"
    )
    done = run(text, "--lr", "3", stdin="typed", options=("--env", "A=b"))
    assert done.stdout == "__main__ ['--lr', '3'] True\n0 1 0 b\nTrue typed\n", done.stderr
    assert done.returncode == 0
    assert not (tmp_path / "home").exists()  # no record


def test_torch_finds_a_group_of_one(run):
    text = (
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "x = torch.ones(1)\ndist.all_reduce(x)\nprint(dist.get_world_size(), x.item())\n"
    )
    assert run(text).stdout == "1 1.0\n"


def test_an_exception_is_the_scripts_own_and_an_exit_code_too(run):
    failed = run("def f():\n    raise ValueError('no')\nf()\n")
    assert failed.returncode == 1
    first, *_, last = failed.stderr.strip().split("\n")
    assert (first, last) == ("Traceback (most recent call last):", "ValueError: no")
    assert "torchmuster" not in failed.stderr
    assert "runpy" not in failed.stderr
    assert run("import sys; sys.exit(7)").returncode == 7


def test_a_debugger_stops_in_the_script(run):
    done = run("total = 6 * 7\nbreakpoint()\nprint('after')\n", stdin="p total\nc\n")
    assert "42" in done.stdout
    assert "after" in done.stdout


def test_a_debugger_around_it_sees_what_is_raised(run):
    before = [sys.executable, "-m", "pdb", "-c", "c", "-m", "torchmuster"]
    done = run("total = 42\nraise ValueError('no')\n", stdin="p total\nq\n", before=before)
    assert "42" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "options", [("--nodes", "2"), ("--nproc-per-node", "gpu"), ("--hosts", "a"), ("--detach",)]
)
def test_what_needs_other_processes_is_refused(run, options):
    done = run("print('ran')", options=options)
    assert done.returncode == 2
    assert f"at: {options[0]}" in done.stderr
    assert "ran" not in done.stdout


def test_the_usual_numbers_are_no_mistake(run):
    options = ("--nodes", "1", "--nproc-per-node", "1", "--max-restarts", "0")
    assert run("print('ran')", options=options).stdout == "ran\n"
