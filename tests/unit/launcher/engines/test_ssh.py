"""Hosts of ssh: what is typed to them, which place each has, and where what they send lands."""

import shutil
import subprocess
import sys

import pytest

from kit.values import run_plan
from kit.waiting import wait_until
from torchmuster.launcher.engines import ssh_command, ssh_files
from torchmuster.launcher.engines.ssh import HostPlaces, bad_hosts, place_to_free, workers_of
from torchmuster.launcher.engines.ssh_command import HostProblem, SshHost, remote_command
from torchmuster.launcher.engines.ssh_files import FetchedFiles, own_paths
from torchmuster.launcher.engines.ssh_host import Bundle, RemoteHost
from torchmuster.launcher.files import code_copy
from torchmuster.launcher.net import replica
from torchmuster.launcher.net.remote_messages import OUTPUT_FILE, FilePiece, FrameError
from torchmuster.launcher.node.remote.files import ReturnedOutputs

LOADER = b"import sys; sys.stdout.write('loaded ' + '$HOME `x` \\'')"


def run_in(shell, command, sent=LOADER):
    return subprocess.run([shell, "-c", command], input=sent, capture_output=True, timeout=30)


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "csh", "tcsh", "fish", "ksh"])
def test_command_survives_the_login_shell(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    command = remote_command("MARK", len(LOADER), (sys.executable,))
    done = run_in(shell, command, LOADER + b"rest")
    assert done.stdout == b"\nMARK\nloaded $HOME `x` '"


def test_python_that_is_too_old_or_missing_is_passed_over():
    command = remote_command("MARK", len(LOADER), ("/bin/false", "/no/python", sys.executable))
    assert b"loaded" in run_in("sh", command).stdout


def test_host_without_python_says_so():
    done = run_in("sh", remote_command("MARK", 1, ()).replace("python", "nothon"), b"")
    assert (done.returncode, done.stdout) == (97, b"\nMARK\nno-nothon\n")


@pytest.mark.parametrize("python", ["a b", "x;rm", "$(x)", "it's", "a\\b", "a`b`"])
def test_interpreter_with_other_than_plain_characters_is_left_out(python):
    assert remote_command("MARK", 1, (python,)) == remote_command("MARK", 1, ())


def test_user_port_and_name_stand_before_the_command():
    host = SshHost(name="n1", user="me", port=2222)
    argv = ssh_command.session_argv(["ssh", "-F", "x"], host, "true")
    assert argv[:3] == ["ssh", "-F", "x"]
    assert argv[-7:] == ["-T", "-l", "me", "-p", "2222", "n1", "true"]
    assert not any("Control" in word for word in argv)


def test_host_that_looks_like_an_option_is_refused():
    with pytest.raises(ValueError, match="not a valid host"):
        ssh_command.session_argv(["ssh"], SshHost(name="-oProxyCommand=x"), "true")


def test_muster_ssh_takes_the_place_of_ssh():
    assert ssh_command.ssh_command({}) == ["ssh"]
    own = {"MUSTER_SSH": "ssh -F 'my config'"}
    assert ssh_command.ssh_command(own) == ["ssh", "-F", "my config"]


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
    assert hint in ssh_command.hint_for("n1", words)


def test_telling_line_is_found_below_a_banner():
    stderr = "*** Welcome ***\n\nme@n1: Permission denied (publickey).\nbye\n"
    found = ssh_command.problem_of("n1", stderr, "silence")
    assert found.words == "me@n1: Permission denied (publickey)."
    assert ssh_command.problem_of("n1", "", "no answer for 10 s").words == "no answer for 10 s"


def test_old_python_is_named():
    assert "(Python 3.9.2)" in ssh_command.no_python("n1", "Python 3.9.2\n").words


def test_marker_names_the_content():
    assert ssh_command.marker_of("ab" * 32) == "torchmuster-abababababababab"


@pytest.mark.parametrize(("silent_s", "is_answering"), [(0.0, True), (9.0, True), (11.0, False)])
def test_a_host_whose_session_is_open_and_silent_does_not_answer(run_dir, silent_s, is_answering):
    bundle = Bundle(ssh=("ssh",), sha="", root="", files=())
    host = RemoteHost(SshHost(name="n1"), bundle, run_dir)
    host.last_heard -= silent_s
    assert host.is_usable
    assert host.is_answering == is_answering


A, B, C = (SshHost(name=name) for name in "abc")


def test_hosts_beyond_the_nodes_are_spare():
    places = HostPlaces([A, B, C], 2)
    assert places.names == ("a", "b")
    assert places.candidates(1) == [B, C]


def test_hosts_that_answer_come_first():
    places = HostPlaces([A, B, C], 3)
    places.settle([C, B])
    assert places.names == ("c", "b", "a")


def test_spare_host_that_takes_a_place_is_spare_no_more():
    places = HostPlaces([A, B, C], 2)
    assert places.take(1, C)
    assert not places.take(1, C)
    assert places.names == ("a", "c")
    assert places.candidates(0) == [A, B]


@pytest.mark.parametrize(
    ("nodes", "living", "trained", "want"),
    [
        ((2, 2), {1, 2}, {0, 1}, 2),  # the spare one's
        ((2, 2), {1, 2}, {0, 2}, 1),  # which has taken another's place before
        ((2, 2), {1}, {0, 1}, None),  # nobody to spare
        ((1, 3), {1, 2}, {0, 1, 2}, 2),  # the world may shrink
        ((1, 3), set(), {0}, None),
    ],
)
def test_the_head_gets_the_host_that_an_attempt_can_do_without(nodes, living, trained, want):
    low, high = nodes
    plan = run_plan(min_nodes=low, max_nodes=high)
    assert place_to_free(living, trained, plan) == want


def test_places_that_exchange_their_hosts_keep_them_apart():
    places = HostPlaces([A, B, C], 3)
    places.exchange(0, 2)
    assert places.names == ("c", "b", "a")
    assert places.candidates(0) == [C]


def test_slots_win_over_gpus_and_gpus_over_the_plan():
    plan = run_plan(max_nodes=3, workers_per_node=(5,))
    hosts = [SshHost(name="a", slots=2), B, C]
    assert workers_of(hosts, {"a": 8, "b": 4}, plan) == (2, 4, 5)


def test_all_bad_hosts_are_in_one_error_with_each_fix_once():
    problems = [HostProblem(host=name, words="no", fix=f"fix {name != 'c'}") for name in "abc"]
    error = bad_hosts(problems, 3, "--on ssh")
    assert error.what == "3 hosts can't be used: a, b, c; the run needs 3"
    assert error.why == "a: no\nb: no\nc: no"
    assert error.fix == "fix True; fix False"
    assert error.exit_code == 5


def piece(path, offset, data):
    return FilePiece(path=path, offset=offset, data=data)


class Host:
    """A host that notes what it is sent."""

    placed = None

    def __init__(self, name):
        self.host = self
        self.name = name
        self.sent = []

    def send(self, message):
        self.sent.append(message)


@pytest.fixture
def back(run_dir):
    return FetchedFiles(run_dir, print)


def test_pieces_land_at_their_places_also_twice(back, tmp_path):
    for offset, data in ((0, b"one\n"), (4, b"two\n"), (4, b"two\n")):
        back.take(piece("logs/main/rank-0.log", offset, data), Host("n1"))
    assert (tmp_path / "logs/main/rank-0.log").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("name", ["secret", "plan.json", "owner.json", "head.json"])
def test_files_of_the_client_are_not_overwritten(back, tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(FrameError):
        back.take(piece(name, 0, b"theirs"), Host("n1"))
    assert (tmp_path / name).read_text() == "mine"


def test_a_link_is_not_followed(back, tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "target")
    back.take(piece("events.jsonl", 0, b"theirs"), Host("n1"))
    assert (tmp_path / "target").read_text() == "mine"
    assert list(back.copy_of("n1").left_out) == ["events.jsonl"]


def test_a_full_disk_is_told_and_what_follows_comes_again(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(ssh_files, "_AGAIN_S", 0.01)
    said, host = [], Host("n1")
    back = FetchedFiles(run_dir, said.append)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(replica.os, "pwrite", full)
        back.take(piece("events.jsonl", 0, b"theirs"), host)
        back.take(piece("events.jsonl", 6, b" too"), host)
    wait_until(lambda: host.sent, "the host to be asked to go back")
    (message,) = host.sent
    assert (message.mark, message.files) == ("", {"events.jsonl": (0, 0)})
    words = "the record of n1 can't be written here: No space left on device; it is tried again"
    assert said == [words]
    back.take(piece("events.jsonl", 0, b"theirs too"), host)
    assert (tmp_path / "events.jsonl").read_text() == "theirs too"


@pytest.mark.parametrize("name", ["job.json", "losses.json"])
def test_what_the_client_acts_upon_is_its_own(back, tmp_path, name):
    back.take(piece(name, 0, b"theirs"), Host("n1"))
    assert not (tmp_path / name).exists()


def test_outputs_land_in_a_folder_of_the_host(run_dir, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "out.txt").write_text("1")
    with (tmp_path / "archive").open("w+b") as archive:
        code_copy.write_archive(str(source), ["out.txt"], archive)
        archive.seek(0)
        back, offset = ReturnedOutputs(run_dir), 0
        while data := archive.read(64):
            back.take(piece(OUTPUT_FILE, offset, data), "n1")
            offset += len(data)
    assert back.unpack("n1", str(tmp_path / "output" / "n1")) == 1
    assert (tmp_path / "output" / "n1" / "out.txt").read_text() == "1"
    assert not list(tmp_path.glob("output-*.part"))


def test_record_of_a_new_head_stands_behind_that_of_the_old_one(back, tmp_path):
    old, new = Host("a"), Host("b")
    back.take(piece("events.jsonl", 0, b"old\n"), old)
    back.append_from("b")
    back.take(piece("events.jsonl", 0, b"new\n"), new)
    back.take(piece("events.jsonl", 4, b"late\n"), old)
    back.take(piece("logs/x.log", 0, b"own\n"), new)
    assert (tmp_path / "events.jsonl").read_bytes() == b"old\nnew\n"
    assert (tmp_path / "logs/x.log").read_bytes() == b"own\n"
    back.take(piece("events.jsonl", 0, b"again\n"), new)
    assert (tmp_path / "events.jsonl").read_bytes() == b"old\nagain\n"


def test_a_new_head_does_not_go_on_in_half_a_line_of_the_old_one(back, tmp_path):
    back.take(piece("events.jsonl", 0, b"old\nhal"), Host("a"))
    back.append_from("b")
    back.take(piece("events.jsonl", 0, b"new\n"), Host("b"))
    assert (tmp_path / "events.jsonl").read_bytes() == b"old\nhal\nnew\n"


def test_paths_of_what_came_back_become_ours_and_others_stay():
    text = "see /h/r/logs/x.log and /h/r/code/a.py, not /h/r/snapshots/3 nor /h/run/logs/x"
    ours = "see /c/r/logs/x.log and /src/a.py, not /h/r/snapshots/3 nor /h/run/logs/x"
    value = {"hint": [text, 1], "at": None}
    assert own_paths(value, "/h/r", "/c/r", "/src") == {"hint": [ours, 1], "at": None}


def test_code_that_was_not_copied_keeps_its_path():
    assert own_paths("/h/r/code/a.py", "/h/r", "/c/r", None) == "/h/r/code/a.py"
