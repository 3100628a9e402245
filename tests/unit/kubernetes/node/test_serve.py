"""The door of a pod, and the calls to it: by a program for each session, or by one process for many."""

import asyncio
import functools
import os
import random
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kit.ports import reserve_port
from kit.waiting import wait_until
from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.model import codec
from torchmuster.core.net import messages
from torchmuster.core.net.address import new_secret, read_secret, write_secret
from torchmuster.core.net.channel import ChannelClosedError, Role, connect
from torchmuster.kubernetes.node.call import PodConnections, ask_pod, call_argv
from torchmuster.kubernetes.node.order import AGAIN_CODE, CLAIM_VARIABLE
from torchmuster.kubernetes.node.serve import is_overused
from torchmuster.launcher.net import part_messages
from unit.kubernetes.pods.conftest import order_of


@pytest.fixture
def key(tmp_path):
    path = str(tmp_path / "key")
    write_secret(path, new_secret())
    return path


@pytest.fixture
def door(key, tmp_path):
    """The first process of a run's second pod; the port at which it serves."""
    path = str(tmp_path / "order.json")
    atomic.write_json(path, codec.to_plain(order_of(port=0, home=str(tmp_path))))
    argv = proc.node_program("pod", "--key", key, "--order", path)
    environment = {**os.environ, "JOB_COMPLETION_INDEX": "1"}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process, int(process.stdout.readline().split()[-1])
        finally:
            process.terminate()
            # Not 0: an index that has succeeded is not made again.
            assert process.wait(30) == AGAIN_CODE


@pytest.fixture
def call(key, door):
    """Call the pod as the engine calls ssh."""

    def run(command, *, given=b"", key=key, port=door[1]):
        argv = [*call_argv(key, port), "-o", "BatchMode=yes", "-T", "127.0.0.1", command]
        return subprocess.run(argv, input=given, capture_output=True, timeout=60, check=False)

    return run


def start(key, port, command, **options):
    argv = [*call_argv(key, port), "127.0.0.1", command]
    usual = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(argv, **{**usual, **options})


@pytest.fixture(params=["a program for it", "one process for many"])
def session(request):
    """Return what runs a command with this input, and returns its exit code, output and errors."""
    if request.param == "one process for many":
        return functools.partial(run, request.getfixturevalue("lines"))
    call = request.getfixturevalue("call")

    def run_program(command, given):
        done = call(command, given=given)
        return done.returncode, done.stdout, done.stderr

    return run_program


def test_a_command_has_our_input_output_errors_and_exit_code(session):
    done = session("cat; echo wrong >&2; exit 3", b"to and fro\n")
    assert done == (3, b"to and fro\n", b"wrong\n")


def test_bytes_of_any_kind_and_number_come_back_whole(session):
    data = os.urandom(5 << 20)
    assert session("cat", data) == (0, data, b"")


def test_a_signal_is_told_as_a_shell_tells_it(call):
    assert call("kill -9 $$").returncode == 128 + 9


def test_a_command_ends_though_what_it_has_started_holds_its_pipes(call):
    done = call("setsid sleep 1000 & echo $!; exit 3")
    os.kill(int(done.stdout), signal.SIGKILL)
    assert done.returncode == 3


def test_a_door_that_is_told_to_stop_waits_for_nothing_that_its_commands_have_started(
    key, door, tmp_path
):
    process, port = door
    with start(key, port, "sleep 1000 & echo $!; wait") as session:
        pid = int(session.stdout.readline())
        started = time.monotonic()
        process.terminate()
        assert process.wait(60) == AGAIN_CODE
        assert time.monotonic() - started < 15.0
        assert session.wait(60) == 128 + signal.SIGTERM
    wait_until(lambda: not proc.is_running(pid), "the end of what it had started")


def test_who_has_another_key_runs_nothing(call, tmp_path):
    path = str(tmp_path / "other")
    write_secret(path, new_secret())
    marker = tmp_path / "ran"
    done = call(f"touch {marker}", key=path)
    assert done.returncode == 255
    assert b"the other side has another secret" in done.stderr
    assert not marker.exists()


def test_where_nobody_listens_it_is_said_in_one_line(call):
    port = reserve_port()
    done = call("true", port=port)
    assert done.returncode == 255
    assert done.stderr.decode().splitlines() == [f"127.0.0.1 port {port}: {os.strerror(111)}"]


def test_a_caller_that_is_killed_ends_the_input_of_its_command(key, door, tmp_path):
    end = tmp_path / "end"
    caller = start(key, door[1], f"echo up; cat > /dev/null; touch {end}")
    assert caller.stdout.readline() == "up\n"
    caller.kill()
    caller.communicate()
    wait_until(end.exists, "the command's end")


def test_a_pod_that_ends_leaves_nothing_behind(key, door):
    caller = start(key, door[1], "echo $$; exec sleep 600")
    pid = int(caller.stdout.readline())
    os.kill(door[0].pid, signal.SIGTERM)
    wait_until(lambda: not proc.is_running(pid), "the end of the command")
    assert caller.wait(30) == 128 + signal.SIGTERM
    caller.communicate()


def test_an_orphan_is_reaped(key, door):
    caller = start(key, door[1], "setsid sh -c 'echo $$; sleep 0.2' & exit 0")
    pid = int(caller.stdout.readline())
    caller.communicate()
    wait_until(lambda: proc.read_process(pid) is None, "the orphan's end")


def claimed(key, port, claim, command):
    """Run a command as the owner in this first pod does."""
    environment = {**os.environ, CLAIM_VARIABLE: claim}
    return start(key, port, command, env=environment, stderr=subprocess.PIPE, text=False)


def test_of_two_owners_the_later_one_is_obeyed_and_the_earlier_one_ends(key, door, tmp_path):
    _, port = door
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    with claimed(key, port, "a", f"touch {begun}; cat; touch {ended}") as earlier:
        wait_until(begun.exists, "its command")
        with claimed(key, port, "b", "echo b") as later:
            assert later.communicate(timeout=180)[0] == b"b\n"
        assert (
            earlier.wait(30) == 255
        )  # its session has ended, and the input of its command with it
        wait_until(ended.exists, "the end of its command")
    with claimed(key, port, "a", f"touch {tmp_path}/never") as again:
        _, said = again.communicate(timeout=180)
    assert again.returncode == AGAIN_CODE
    assert b"another first pod has this run now" in said
    assert not (tmp_path / "never").exists()


def test_a_client_is_served_whoever_owns_the_run(key, door, call):
    with claimed(key, door[1], "a", "true") as owner:
        assert owner.wait(30) == 0
    assert call("echo here").stdout == b"here\n"


def said_to(port, key, frames):
    """Say these things to a pod, as one who knows the key."""

    async def say():
        channel = await connect("127.0.0.1", port, Role.SESSION, read_secret(key))
        try:
            for frame in frames:
                await channel.send_bytes(frame)
                await asyncio.sleep(0)
            async with asyncio.timeout(0.2):
                while True:
                    await channel.receive_bytes()
        except (ChannelClosedError, OSError, TimeoutError):
            pass
        finally:
            channel.abort()

    asyncio.run(say())


@pytest.mark.parametrize("seed", range(12))
def test_what_is_said_by_one_who_knows_the_key_breaks_no_door(key, door, call, tmp_path, seed):
    draw, marker = random.Random(seed), tmp_path / "end"
    start = part_messages.ExecStart(
        exec_id="1", task="", argv=("sh", "-c", f"cat >/dev/null; touch {marker}"),
        window_bytes=draw.choice([-1, 0, 1, 1 << 40]), claim=draw.choice(["", "x" * 9999]),
        tty=draw.random() < 0.2, rows=draw.choice([-5, 24, 1 << 40]),
    )  # fmt: skip
    later = [
        part_messages.ExecInput(exec_id="1", data=draw.randbytes(draw.choice([0, 1, 900_000]))),
        part_messages.ExecAcknowledged(exec_id="1", size_bytes=draw.choice([-(1 << 70), 1 << 70])),
        part_messages.ExecSignal(exec_id="1", signum=draw.choice([-1, 0, 28, 65, 1 << 40])),
        part_messages.ExecResize(exec_id="2", rows=-1, columns=1 << 90),
        part_messages.ExecEnded(exec_id="1", code=0),
    ]
    frames = [messages.encode(start), *map(messages.encode, draw.choices(later, k=12))]
    for number, frame in enumerate(frames):
        if draw.random() < 0.2:
            at = draw.randrange(len(frame))
            frames[number] = frame[:at] + draw.randbytes(3) + frame[at + 3 :]
    said_to(door[1], key, frames[draw.randint(0, 2) :])
    assert call("echo here").stdout == b"here\n"
    assert door[0].poll() is None


# Sessions with pods that one process carries, without a process for each.


LIMIT_S = 60.0


@pytest.fixture
def lines(key, door):
    """Return the lines to a pod."""
    return PodConnections(secret=read_secret(key), port=door[1], domain="", wait_s=0.0)


def run(lines, command, given=b"", *, host="127.0.0.1"):
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
    giving.start()
    with open(ours_out, "rb") as out, open(ours_errors, "rb") as errors:
        said = out.read(), errors.read()
    giving.join(LIMIT_S)
    return line.wait(LIMIT_S), *said


def talk_at_once(lines, number, given):
    """Hold so many sessions at once; see that each has its own stream back, whole."""
    with ThreadPoolExecutor(number) as pool:
        said = pool.map(lambda one: run(lines, f"cat; echo {one}", given)[1], range(number))
        assert list(said) == [given + f"{one}\n".encode() for one in range(number)]


def test_many_sessions_at_once_are_one_process_and_keep_their_streams_apart(lines):
    talk_at_once(lines, 16, b"x")


def test_a_reader_that_takes_nothing_and_a_flood_hold_up_none_of_64_others(lines):
    stalled_out, stalled_in = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    flood = lines.start(["-T", "127.0.0.1", "yes"], null, stalled_in, null)
    os.read(stalled_out, 1)  # it runs, and nobody reads more of it
    shown = os.open("/dev/null", os.O_WRONLY)
    busy = lines.start(["-T", "127.0.0.1", "yes"], null, shown, null)
    talk_at_once(lines, 64, b"x" * 300_000)
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


def test_a_line_that_is_ended_ends_its_session_and_leaves_its_descriptors_to_the_next(lines):
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


def test_a_pod_without_a_name_is_told_as_ssh_tells_it(lines):
    status, out, errors = run(lines, "true", host="no-such-pod.invalid")
    assert (status, out) == (255, b"")
    assert errors.endswith(b"its name is not known\n")


def test_one_question_has_one_answer(key, door):
    secret, port = read_secret(key), door[1]
    said = ask_pod("127.0.0.1", port, secret, "wc -c; exit 4", LIMIT_S, b"x" * 600_000)
    assert (said.status, said.stdout.strip()) == (4, b"600000")
    assert ask_pod("127.0.0.1", port, new_secret(), "true", LIMIT_S).status == 255


# Whether a pod that is asked to end is taken away for its own use: of its disk, or of its node's memory.


MIB = 1 << 20


def write_memory(root, *, free_mib, used_mib, cached_mib=0):
    """Write what the kernel shows of a node with 16 GiB, and of the pod on it."""
    (root / "proc").mkdir()
    lines = f"MemTotal: {16 << 20} kB\nMemAvailable: {free_mib << 10} kB\n"
    (root / "proc" / "meminfo").write_text(lines)
    group = root / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {cached_mib * MIB}\n")
    (group / "memory.current").write_text(f"{used_mib * MIB}\n")


@pytest.mark.parametrize(("size", "is_over"), [(MIB, False), (3 * MIB, True)])
def test_a_disk_is_overused_that_has_more_than_its_limit(tmp_path, size, is_over):
    disk = tmp_path / "disk"
    (disk / "deep").mkdir(parents=True)
    (disk / "deep" / "file").write_bytes(b"x" * size)
    environment = {"MUSTER_POD_DISK": str(disk), "MUSTER_POD_DISK_BYTES": str(2 * MIB)}
    assert is_overused(environment, str(tmp_path)) == is_over
    assert not is_overused({"MUSTER_POD_DISK": str(disk)}, str(tmp_path))  # it has no limit


@pytest.mark.parametrize(
    ("free_mib", "used_mib", "cached_mib", "is_over"),
    [
        (100, 900, 0, True),
        (9000, 900, 0, False),  # the node is not short of it: it is drained
        (100, 400, 0, False),  # others use more than they ask for
        (100, 900, 600, False),  # files that nobody reads are given back
    ],
)
def test_memory_is_overused_where_the_node_is_short_of_it(
    tmp_path, free_mib, used_mib, cached_mib, is_over
):
    write_memory(tmp_path, free_mib=free_mib, used_mib=used_mib, cached_mib=cached_mib)
    environment = {"MUSTER_POD_MEMORY_BYTES": str(512 * MIB)}
    assert is_overused(environment, str(tmp_path)) == is_over


def test_what_can_not_be_read_is_no_evidence(tmp_path):
    assert not is_overused({"MUSTER_POD_MEMORY_BYTES": "1"}, str(tmp_path))
    assert not is_overused({}, str(tmp_path))
