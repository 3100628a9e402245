"""The launcher of `muster exec`: what it takes over from a process, and what it says when it can't."""

import os
import subprocess

import pytest

from torchmuster.core import proc
from torchmuster.launcher.node.exec_launch import find_shell, read_environment
from torchmuster.launcher.node.namespaces import NOT_FOUND, VIEW_FAILED, LaunchError


@pytest.fixture
def sibling(tmp_path):
    """Return a process with a folder and variables of its own."""
    environment = {"PATH": os.environ["PATH"], "COLOUR": "light blue"}
    pipe = subprocess.PIPE
    with subprocess.Popen(["cat"], cwd=tmp_path, env=environment, stdin=pipe, stdout=pipe) as child:
        child.stdin.write(b"running\n")
        child.stdin.flush()
        # Popen returns when the kernel has closed the old program's files: variables come a moment later
        assert child.stdout.readline() == b"running\n"
        yield child.pid
        child.kill()


def launch(pid, *words):
    argv = proc.node_program("exec", f"--pid={pid}", "--", *words)
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, input="echo shell\n")


def test_folder_and_variables_of_the_process_are_taken_over(sibling, tmp_path):
    ended = launch(sibling, "sh", "-c", 'pwd; echo "$COLOUR"; exit 4')
    assert (ended.returncode, ended.stdout) == (4, f"{tmp_path}\nlight blue\n"), ended.stderr


def test_without_words_a_shell_is_started(sibling):
    assert launch(sibling).stdout == "shell\n"


def test_words_like_our_own_options_belong_to_the_command(sibling):
    assert launch(sibling, "echo", "--pid", "--", "-h").stdout == "--pid -- -h\n"


@pytest.mark.parametrize("pid", [1, 2**22 + 1])
def test_a_process_that_is_not_our_sibling_is_not_entered(pid):
    ended = launch(pid, "true")
    assert ended.returncode == VIEW_FAILED
    assert ended.stderr.startswith("muster: the task's process ")


def test_a_missing_command_is_code_127(sibling):
    ended = launch(sibling, "no-such-command")
    assert (ended.returncode, "was not found" in ended.stderr) == (127, True)


def test_the_environment_is_that_of_the_start(sibling):
    assert read_environment(sibling)["COLOUR"] == "light blue"


def test_bash_comes_before_sh(tmp_path):
    for name in ("sh", "bash"):
        path = tmp_path / name
        path.write_text("")
        path.chmod(0o755)
        assert find_shell(str(tmp_path)) == str(path)


def test_a_task_without_a_shell_has_to_be_given_a_command(tmp_path):
    with pytest.raises(LaunchError, match="name a command") as caught:
        find_shell(str(tmp_path))
    assert caught.value.code == NOT_FOUND
