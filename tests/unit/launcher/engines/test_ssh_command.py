"""What is typed to ssh: right for every login shell; and what its words mean."""

import shutil
import subprocess
import sys

import pytest

from torchmuster.launcher.engines.ssh_command import (
    SshHost,
    hint_for,
    marker_of,
    no_python,
    problem_of,
    remote_command,
    session_argv,
    ssh_command,
)

LOADER = b"import sys; sys.stdout.write('loaded ' + '$HOME `x` \\'')"


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "csh", "tcsh", "fish", "ksh"])
def test_command_survives_the_login_shell(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    command = remote_command("MARK", len(LOADER), (sys.executable,))
    done = subprocess.run(
        [shell, "-c", command], input=LOADER + b"rest", capture_output=True, timeout=30
    )
    assert done.stdout == b"\nMARK\nloaded $HOME `x` '"


def test_python_that_is_too_old_or_missing_is_passed_over():
    command = remote_command("MARK", len(LOADER), ("/bin/false", "/no/python", sys.executable))
    done = subprocess.run(["sh", "-c", command], input=LOADER, capture_output=True, timeout=30)
    assert b"loaded" in done.stdout


def test_host_without_python_says_so(tmp_path):
    command = remote_command("MARK", 1, ()).replace("python", "nothon")
    done = subprocess.run(["sh", "-c", command], input=b"", capture_output=True, timeout=30)
    assert done.returncode == 97
    assert done.stdout == b"\nMARK\nno-nothon\n"


@pytest.mark.parametrize("python", ["a b", "x;rm", "$(x)", "it's", "a\\b", "a`b`"])
def test_interpreter_with_other_than_plain_characters_is_left_out(python):
    assert remote_command("MARK", 1, (python,)) == remote_command("MARK", 1, ())


def test_user_port_and_name_stand_before_the_command():
    host = SshHost(name="n1", user="me", port=2222)
    argv = session_argv(["ssh", "-F", "x"], host, "true")
    assert argv[:3] == ["ssh", "-F", "x"]
    assert argv[-7:] == ["-T", "-l", "me", "-p", "2222", "n1", "true"]
    assert not any("Control" in word for word in argv)


def test_host_that_looks_like_an_option_is_refused():
    with pytest.raises(ValueError, match="not a valid host"):
        session_argv(["ssh"], SshHost(name="-oProxyCommand=x"), "true")


def test_muster_ssh_takes_the_place_of_ssh():
    assert ssh_command({}) == ["ssh"]
    assert ssh_command({"MUSTER_SSH": "ssh -F 'my config'"}) == ["ssh", "-F", "my config"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("me@n1: Permission denied (publickey,password).", "ssh-copy-id n1"),
        ("Host key verification failed.", "`ssh n1` once"),
        ("ssh: Could not resolve hostname n1: Name or service not known", "DNS"),
        ("ssh: connect to host n1 port 22: Connection refused", "sshd"),
        ("ssh: connect to host n1 port 22: Connection timed out", "ssh n1 true"),
        ("something else", "BatchMode=yes n1 true"),
    ],
)
def test_words_of_ssh_have_a_hint(words, hint):
    assert hint in hint_for("n1", words)


def test_telling_line_is_found_below_a_banner():
    stderr = "*** Welcome ***\n\nme@n1: Permission denied (publickey).\nbye\n"
    assert problem_of("n1", stderr, "silence").words == "me@n1: Permission denied (publickey)."
    assert problem_of("n1", "", "no answer for 10 s").words == "no answer for 10 s"


def test_old_python_is_named():
    assert "(Python 3.9.2)" in no_python("n1", "Python 3.9.2\n").words


def test_marker_names_the_content():
    assert marker_of("ab" * 32) == "torchmuster-abababababababab"
