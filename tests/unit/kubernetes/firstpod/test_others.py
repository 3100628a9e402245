"""What the first pod has of the others: copies of its record, of this run alone, and word of who is missing."""

import asyncio
import contextlib
import hashlib
import os
import shlex
import subprocess
import threading

import pytest

from kit.ports import reserve_port
from kit.waiting import wait_until
from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.model import codec
from torchmuster.core.net.address import bind
from torchmuster.core.net.listener import Listener
from torchmuster.errors import JoinTimeoutError
from torchmuster.kubernetes.firstpod.others import PodWait, RecordReplicas
from torchmuster.kubernetes.pods.pull import BROKEN, Push, program
from torchmuster.launcher.net import remote_messages as messages
from torchmuster.launcher.net.remote_messages import FrameReader
from torchmuster.launcher.net.replica import CopyScope
from torchmuster.launcher.node.remote.files import MARK_FILE, make_mark
from unit.core.net.loopback import SECRET
from unit.kubernetes.pods.conftest import order_of

RECORD = '{"event":"run_started"}\n'


class OtherPods:
    """Lets the command for another pod run here, in the home of that pod."""

    def __init__(self, folder):
        self.folder, self.asked = folder, []

    def start(self, argv, stdin, stdout, stderr):
        host, command = argv
        self.asked.append(command)
        home = self.folder / "others" / host.partition(".")[0]
        variables = {
            "MUSTER_HOME": str(home),
            "MUSTER_ORDER": str(self.folder / "order.json"),
            "MUSTER_PROGRAMS": shlex.join(proc.node_program("")[:-1]),
        }
        words = [f"{name}={value}" for name, value in variables.items()]
        return proc.start_spared(
            ["env", *words, "sh", "-c", command], stdin=stdin, stdout=stdout, stderr=stderr
        )

    def kept(self, index=1):
        """Return what a pod keeps, by its path below the pod's home."""
        return sorted((self.folder / "others").glob(f"*-{index}/records/*/events.jsonl"))


@pytest.fixture
def others(tmp_path):
    return OtherPods(tmp_path)


def neighbours_of(others, pod, run_id, **given):
    order = order_of(home=str(others.folder / pod), run_id=run_id, **given)
    os.makedirs(order.run_dir.path, exist_ok=True)
    atomic.write_json(str(others.folder / "order.json"), codec.to_plain(order))
    return RecordReplicas(order, others.start), order.run_dir


def copy_record(others, run_id, text=RECORD):
    """Let a first pod's record come to its neighbour; return the run directory and what ends the copying."""
    neighbours, run_dir = neighbours_of(others, "first", run_id)
    make_mark(run_dir.path)
    with open(run_dir.events, "w") as file:
        file.write(text)
    neighbours.start()
    wait_until(lambda: others.kept() and others.kept()[0].read_text() == text, "the copy")
    return neighbours, run_dir


def find_again(others, say, run_id="run-1", **given):
    """Let a first pod that was made again look for its record; return its run directory."""
    again, run_dir = neighbours_of(others, "again", run_id, **given)
    again.say = say
    again.find()
    return run_dir


def test_a_first_pod_that_was_made_again_finds_its_record(others):
    neighbours, first = copy_record(others, "run-1")
    neighbours.stop(is_taken_away=True)
    said = []
    run_dir = find_again(others, said.append)
    for path in (run_dir.events, os.path.join(run_dir.path, MARK_FILE)):
        with open(path) as file, open(path.replace(run_dir.path, first.path)) as before:
            assert file.read() == before.read()
    assert len(said) == 1


def test_who_takes_the_place_of_a_pod_that_is_taken_away_finds_its_last_words(others):
    neighbours, first = copy_record(others, "run-1")
    with open(first.events, "a") as file:
        file.write('{"event":"run_ended"}\n')
    neighbours.stop(is_taken_away=True)
    assert others.kept()[0].read_text() == RECORD + '{"event":"run_ended"}\n'


def test_of_two_keepers_the_later_one_has_the_copy(others):
    """The earlier one stood still while its way broke: what it has still to write is of yesterday."""
    neighbours, _ = neighbours_of(others, "first", "run-1")
    folder = others.folder / "others" / "x"
    words = ["env", f"MUSTER_HOME={folder}", *proc.node_program("pod-keep")]
    words.append(f"--order={others.folder / 'order.json'}")

    def keeper():
        started = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert isinstance(FrameReader(started.stdout.fileno()).read(20.0), messages.CopyHas)
        return started

    def tell(one, *said):
        for message in said:
            one.stdin.write(messages.pack(message))
        one.stdin.flush()

    first = keeper()
    tell(first, messages.CopyOf(mark="d"), piece_of(0, b"one\n"))
    kept = folder / "records" / neighbours.order.run_id / "events.jsonl"
    wait_until(lambda: kept.exists() and kept.read_bytes() == b"one\n", "the first line")
    second = keeper()
    tell(second, messages.CopyOf(mark="d"), piece_of(0, b"one\ntwo\n"), messages.CopyEnd())
    assert isinstance(FrameReader(second.stdout.fileno()).read(20.0), messages.CopyHeld)
    tell(first, piece_of(0, b"on"), messages.CopyEnd())
    assert first.wait(20) == 1
    assert kept.read_bytes() == b"one\ntwo\n"
    for one in (first, second):
        one.stdin.close(), one.stdout.close(), one.wait(20)


def test_code_that_two_clients_send_at_once_is_whole(others, tmp_path):
    code = os.urandom(6 << 20)
    (tmp_path / "pods").mkdir()
    (tmp_path / "pods" / "code.tar.gz").write_bytes(code)
    neighbours, _ = neighbours_of(
        others, "first", "run-1", code_bytes=len(code), code_sha=hashlib.sha256(code).hexdigest()
    )
    order, at_once = neighbours.order, threading.Event()
    at_once.set()
    argv = [order.address(0), program("pod-keep --code")]
    held = []

    def send():
        scope = CopyScope(("code.tar.gz",))
        while len(held) < 2:
            with contextlib.suppress(*BROKEN):
                if Push(argv, others.start).run(
                    str(tmp_path / "pods"), scope, order.code_sha, at_once
                ):
                    held.append(True)
                    return

    threads = [threading.Thread(target=send, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(held) == 2, "both to hear that the pod has it")
    with open(order.archive, "rb") as file:
        assert file.read() == code


def piece_of(offset, data):
    return messages.FilePiece(path="events.jsonl", offset=offset, data=data)


def test_of_a_line_that_came_in_part_nothing_is_taken(others):
    neighbours, _ = copy_record(others, "run-1", RECORD + '{"event":"att')
    neighbours.stop(is_taken_away=True)
    run_dir = find_again(others, lambda _: None)
    with open(run_dir.events) as file:
        assert file.read() == RECORD


def test_a_copy_of_another_disk_begins_anew(others):
    neighbours, first = copy_record(others, "run-1", RECORD * 3)
    neighbours.stop(is_taken_away=True)
    os.unlink(os.path.join(first.path, MARK_FILE))
    neighbours, _ = copy_record(others, "run-1", RECORD)
    neighbours.stop(is_taken_away=True)
    assert others.kept()[0].read_text() == RECORD


@pytest.mark.parametrize("given", [{"run_id": "run-2"}, {"run_id": "run-1", "group": "g"}])
def test_the_record_of_another_run_or_group_is_not_taken(others, given):
    neighbours, _ = copy_record(others, "run-1")
    neighbours.stop(is_taken_away=True)
    run_dir = find_again(others, pytest.fail, **given)
    assert not os.path.exists(run_dir.events)


def test_on_a_volume_nobody_is_asked(others):
    neighbours, _ = neighbours_of(others, "again", "run-1", has_volume=True)
    neighbours.say = pytest.fail
    neighbours.find()
    neighbours.start()
    assert others.asked == []


# Waiting for pods: who is missing, and why.


async def serve(channel):
    await channel.receive()


def wait(order, *, least, most, limit_s=0.3, doors=(), **more):
    """Wait for pods of which those on this machine have a door; the first is 127.0.0.1."""

    async def go():
        listeners = [
            Listener(bind("127.0.0.1", port), (SECRET, None), serve, lambda peer, error: None)
            for port in doors
        ]
        serving = [asyncio.create_task(one.serve()) for one in listeners]
        told = {"order": order, "secret": SECRET, "last_call_s": 0.0, "say": lambda _: None, **more}
        pods = PodWait(least=least, most=most, **told)
        try:
            return await asyncio.wait_for(pods.wait(limit_s), 60)
        finally:
            for one in serving:
                one.cancel()

    return asyncio.run(go())


def test_enough_pods_are_not_kept_waiting_for_more():
    port = reserve_port()
    order = order_of(job="no-such-run.invalid", num_pods=3, port=port)
    assert wait(order, least=1, most=3, doors=[port], limit_s=30.0) == [0]


def test_time_in_which_the_cluster_has_no_room_does_not_count(tmp_path):
    """A client says so again and again; when it does no more, the limit counts on."""
    port = reserve_port()
    order = order_of(job="run.invalid", num_pods=2, port=port, home=str(tmp_path))
    os.makedirs(order.folder)
    with open(order.no_room, "w") as note:
        note.write("no node has room for it now")
    said = []

    def say(text):
        said.append(text)
        if len(said) == 5:
            os.unlink(order.no_room)

    with pytest.raises(JoinTimeoutError):
        wait(order, least=2, most=2, limit_s=0.25, say=say, say_every_s=0.1)
    assert all(text.endswith("; no node has room for it now") for text in said[:5])


def test_missing_pods_are_named_with_why_each_is_missing():
    port = reserve_port()
    order = order_of(job="run.invalid", num_pods=2, port=port)
    with pytest.raises(JoinTimeoutError) as caught:
        wait(order, least=2, most=2, doors=[port])
    error = caught.value
    assert error.what == "only 1 of 2 pods came within 0 s"
    assert (error.where, error.why) == ("run.invalid-1", "run.invalid-1 (its name is not known)")
    assert error.fix.startswith("`kubectl describe pod run.invalid-1` tells what it waits for")
    assert "the cluster's DNS or the run's headless Service" in error.fix


def test_a_door_that_is_closed_is_no_matter_of_names():
    order = order_of(job="run.invalid", num_pods=1, port=reserve_port())
    with pytest.raises(JoinTimeoutError) as caught:
        wait(order, least=1, most=1)
    assert caught.value.why == "run.invalid-0 (Connection refused)"
    assert "DNS" not in caught.value.fix
