"""Sessions with a pod, by its two programs: the door and the call."""

import asyncio
import os
import random
import signal
import subprocess
import time

import pytest

from kit.ports import reserve_port
from kit.waiting import wait_until
from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.model import codec
from torchmuster.core.net import messages
from torchmuster.core.net.address import new_secret, read_secret, write_secret
from torchmuster.core.net.channel import ChannelClosedError, Role, connect
from torchmuster.kubernetes.node.call import call_argv
from torchmuster.kubernetes.node.order import AGAIN_CODE, CLAIM_VARIABLE, PodOrder
from torchmuster.launcher.net import part_messages


@pytest.fixture
def key(tmp_path):
    path = str(tmp_path / "key")
    write_secret(path, new_secret())
    return path


@pytest.fixture
def door(key, tmp_path):
    """The first process of a run's second pod; the port at which it serves."""
    order = PodOrder(
        run_id="r", job="r", num_pods=2, port=0, home=str(tmp_path), code_root="/x", code_sha=""
    )
    path = str(tmp_path / "order.json")
    atomic.write_json(path, codec.to_plain(order))
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


def start(key, port, command):
    argv = [*call_argv(key, port), "127.0.0.1", command]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_command_has_our_input_output_errors_and_exit_code(call):
    done = call("cat; echo wrong >&2; exit 3", given=b"to and fro\n")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"to and fro\n", b"wrong\n")


def test_bytes_of_any_kind_and_number_come_back_whole(call):
    data = os.urandom(5 << 20)
    assert call("cat", given=data).stdout == data


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
    argv = [*call_argv(key, port), "127.0.0.1", command]
    environment = {**os.environ, CLAIM_VARIABLE: claim}
    return subprocess.Popen(
        argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


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
