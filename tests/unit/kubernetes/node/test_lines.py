"""Sessions with pods that one process carries, without a process for each."""

import os
import threading

import pytest

from torchmuster.core.net.address import new_secret, read_secret
from torchmuster.kubernetes.node.call import PodConnections, ask_pod
from unit.kubernetes.node.test_session import door, key  # noqa: F401  # fixtures

LIMIT_S = 60.0


@pytest.fixture
def lines(key, door):  # noqa: F811
    """Return the lines to a pod."""
    return PodConnections(secret=read_secret(key), port=door[1], domain="", wait_s=0.0)


def run(lines, command, given=b"", *, host="127.0.0.1", ends=False):
    """Run a command in a pod; return its exit code, output and errors."""
    theirs_in, ours_in = os.pipe()
    ours_out, theirs_out = os.pipe()
    ours_errors, theirs_errors = os.pipe()
    line = lines.start(["-T", host, command], theirs_in, theirs_out, theirs_errors)
    for fd in (theirs_in, theirs_out, theirs_errors):
        os.close(fd)

    def give():
        with open(ours_in, "wb") as file:
            file.write(given)

    giving = threading.Thread(target=give)
    if ends:
        line.send_signal(15)
        os.close(ours_in)
    else:
        giving.start()
    with open(ours_out, "rb") as out, open(ours_errors, "rb") as errors:
        said = out.read(), errors.read()
    if not ends:
        giving.join(LIMIT_S)
    return line.wait(LIMIT_S), *said


def test_a_command_has_its_input_output_errors_and_exit_code(lines):
    done = run(lines, "cat; echo wrong >&2; exit 3", b"to and fro\n")
    assert done == (3, b"to and fro\n", b"wrong\n")


def test_bytes_of_any_kind_and_number_come_back_whole(lines):
    data = os.urandom(3 << 20)
    assert run(lines, "cat", data) == (0, data, b"")


def test_many_sessions_at_once_are_one_process_and_keep_their_streams_apart(lines):
    found = {}

    def one(number):
        found[number] = run(lines, f"cat; echo {number}", b"x")[1]

    threads = [threading.Thread(target=one, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert found == {number: f"x{number}\n".encode() for number in range(16)}


def test_a_reader_that_takes_nothing_and_a_flood_hold_up_none_of_64_others(lines):
    stalled_out, stalled_in = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    flood = lines.start(["-T", "127.0.0.1", "yes"], null, stalled_in, null)
    os.read(stalled_out, 1)  # it runs, and nobody reads more of it
    shown = os.open("/dev/null", os.O_WRONLY)
    busy = lines.start(["-T", "127.0.0.1", "yes"], null, shown, null)
    found = {}

    def one(number):
        found[number] = run(lines, f"cat; echo {number}", b"x" * 300_000)[1]

    threads = [threading.Thread(target=one, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert found == {number: b"x" * 300_000 + f"{number}\n".encode() for number in range(64)}
    for line in (flood, busy):
        assert line.poll() is None
        line.send_signal(15)
        assert line.wait(LIMIT_S) == 255
    for fd in (stalled_out, stalled_in, null, shown):
        os.close(fd)


def test_what_a_plain_file_holds_is_sent_and_what_comes_is_written_into_one(lines, tmp_path):
    given, got = tmp_path / "given", tmp_path / "got"
    given.write_bytes(os.urandom(5 << 20))
    with given.open("rb") as source, got.open("wb") as target:
        line = lines.start(["-T", "127.0.0.1", "cat"], source.fileno(), target.fileno(), 2)
        assert line.wait(LIMIT_S) == 0
    assert got.read_bytes() == given.read_bytes()


def test_a_line_that_is_ended_leaves_its_descriptors_to_the_next(lines):
    """Both have the same numbers in one loop: what is still watched of the first would be deaf in the second."""
    for _ in range(5):
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        null = os.open(os.devnull, os.O_WRONLY)
        line = lines.start(["-T", "127.0.0.1", "echo up; cat"], theirs_in, theirs_out, null)
        for fd in (theirs_in, theirs_out, null):
            os.close(fd)
        assert os.read(ours_out, 3) == b"up\n"
        line.send_signal(15)
        assert line.wait(LIMIT_S) == 255
        os.close(ours_in)
        os.close(ours_out)
        assert run(lines, "cat", b"heard") == (0, b"heard", b"")


def test_who_reads_no_more_ends_the_command(lines):
    ours_out, theirs_out = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    line = lines.start(["-T", "127.0.0.1", "yes"], null, theirs_out, null)
    os.close(theirs_out)
    os.read(ours_out, 1)
    os.close(ours_out)
    assert line.wait(LIMIT_S) == 255
    os.close(null)


def test_a_line_that_is_ended_ends_its_session(lines):
    assert run(lines, "sleep 100", ends=True)[0] == 255


def test_a_pod_without_a_name_is_told_as_ssh_tells_it(lines):
    status, out, errors = run(lines, "true", host="no-such-pod.invalid")
    assert (status, out) == (255, b"")
    assert errors.endswith(b"its name is not known\n")


def test_one_question_has_one_answer(key, door):  # noqa: F811
    secret, port = read_secret(key), door[1]
    said = ask_pod("127.0.0.1", port, secret, "wc -c; exit 4", LIMIT_S, b"x" * 600_000)
    assert (said.status, said.stdout.strip()) == (4, b"600000")
    assert ask_pod("127.0.0.1", port, new_secret(), "true", LIMIT_S).status == 255
