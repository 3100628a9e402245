"""Messages between client and remote end: whole, bounded, and nothing outside of the run directory."""

import contextlib
import json
import os
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.values import run_plan
from torchmuster.launcher.net import remote_messages


@pytest.fixture
def pipe():
    ends = os.pipe()
    pipe = os.fstat(ends[0]).st_ino
    yield ends
    for fd in ends:
        with contextlib.suppress(OSError):
            # A writer has closed its end, and the number may be another's.
            if os.fstat(fd).st_ino == pipe:
                os.close(fd)


def read_all(reader):
    """Return what comes until the other end is closed."""
    found = []
    while (message := reader.read(5.0)) is not None:
        found.append(message)
    return found


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=300)), max_size=20))
def test_what_is_packed_is_read_in_order(sent):
    messages = [remote_messages.RelayData(call_id=number, data=data) for number, data in sent]
    source, target = os.pipe()
    with os.fdopen(source, "rb"):
        with os.fdopen(target, "wb") as file:
            file.write(b"".join(remote_messages.pack(message) for message in messages))
        assert read_all(remote_messages.FrameReader(source)) == messages


def test_length_beyond_the_limit_is_refused_before_it_is_read(pipe):
    os.write(pipe[1], remote_messages.LENGTH.pack(remote_messages.MAX_FRAME_BYTES + 1))
    with pytest.raises(remote_messages.FrameError, match="bytes"):
        remote_messages.FrameReader(pipe[0]).read(5.0)


def test_message_beyond_the_limit_is_not_sent():
    with pytest.raises(ValueError, match="RelayData has"):
        remote_messages.pack(
            remote_messages.RelayData(call_id=1, data=bytes(remote_messages.MAX_FRAME_BYTES))
        )


def test_silence_is_a_timeout(pipe):
    with pytest.raises(TimeoutError):
        remote_messages.FrameReader(pipe[0]).read(0.01)


def test_noise_before_the_marker_is_set_aside(pipe):
    os.write(
        pipe[1],
        b"Welcome!\nmodule loaded\nMARK\n" + remote_messages.pack(remote_messages.RemotePong()),
    )
    reader = remote_messages.FrameReader(pipe[0])
    assert reader.read_until(b"MARK", 1000, 5.0) == b"Welcome!\nmodule loaded\n"
    assert reader.read(5.0) == remote_messages.RemotePong()


def test_endless_noise_is_refused(pipe):
    os.write(pipe[1], b"x" * 2000)
    with pytest.raises(remote_messages.FrameError, match="1000"):
        remote_messages.FrameReader(pipe[0]).read_until(b"MARK", 1000, 5.0)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "logs/../../x", "a//b", "./a", "a\0b", ""])
def test_file_outside_of_the_run_directory_is_refused(path):
    plain = {"type": "FilePiece", "path": path, "offset": 0, "data": ""}
    with pytest.raises(remote_messages.FrameError):
        remote_messages.decode(json.dumps(plain))


def test_file_whose_name_is_no_text_comes_back_as_it_was():
    piece = remote_messages.FilePiece(
        path=os.fsdecode(b"logs/\xff b.log"), offset=7, data=b"\0data"
    )
    assert remote_messages.decode(remote_messages.encode(piece)) == piece


@pytest.mark.parametrize(
    "more",
    [{"place": "1"}, {"place": None}, {"unknown": 1}, {"heads": "127.0.0.1:1"}, {"type": "Shell"}],
)
def test_field_that_is_not_declared_so_is_refused(more):
    plain = {"type": "StartNode", "place": 1, **more}
    with pytest.raises(remote_messages.FrameError):
        remote_messages.decode(json.dumps(plain))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[1]",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b"{}",
        b"\0",
        b"[1]\0x",
        b'{"type": "RelayClose", "call_id": 1}\0',  # bytes for a message that has none
        b'{"type": "RelayData", "call_id": 1}',  # none for one that has
        b'{"type": "RelayData", "call_id": 1, "data": "a!"}',
    ],
)
def test_what_is_no_message_is_refused(payload):
    with pytest.raises(remote_messages.FrameError):
        remote_messages.decode(payload)


def test_secret_is_not_in_what_a_message_shows_of_itself():
    secrets = {"token": "t0ken", "secret": "s3cret"}
    fields = {"run_dir": "/r", "may_share": True, "script": None, "code_root": "/"}
    message = remote_messages.SetUpRun(plan=run_plan(), **secrets, **fields)
    assert remote_messages.decode(remote_messages.encode(message)) == message
    assert "s3cret" not in repr(message)
    assert "t0ken" not in repr(message)


def test_writer_pings_while_nothing_else_is_sent(pipe):
    writer = remote_messages.FrameWriter(pipe[1])
    writer.ping_every(0.01)
    reader = remote_messages.FrameReader(pipe[0])
    assert [reader.read(5.0) for _ in range(3)] == [remote_messages.RemotePing()] * 3
    writer.close()
    read_all(reader)


def test_writer_pings_between_bulk_data_too(pipe):
    writer = remote_messages.FrameWriter(pipe[1])
    writer.ping_every(0.01)
    reader = remote_messages.FrameReader(pipe[0])
    bulk = remote_messages.RelayData(call_id=1, data=bytes(1 << 18))
    sending = threading.Event()

    def send():
        while not sending.is_set() and writer.send(bulk, bulk=True):
            continue

    thread = threading.Thread(target=send)
    thread.start()
    heard = []
    while heard.count(remote_messages.RemotePing()) < 3:
        heard.append(reader.read(5.0))
    sending.set()

    def finish():
        thread.join()  # it may wait until more is read
        writer.close()

    finishing = threading.Thread(target=finish)
    finishing.start()
    read_all(reader)
    finishing.join()
    assert len(heard) > heard.count(remote_messages.RemotePing())


def test_a_piece_of_an_environment_travels_as_bytes(pipe):
    writer, reader = remote_messages.FrameWriter(pipe[1]), remote_messages.FrameReader(pipe[0])
    piece = remote_messages.EnvironmentPiece(index=-1, data=bytes(range(256)))
    writer.send(piece)
    assert reader.read(5.0) == piece
    assert len(remote_messages.pack(piece)) < 256 + 64
    writer.send_raw(remote_messages.LENGTH.pack((1 << 32) - 1))
    with pytest.raises(remote_messages.FrameError):
        reader.read(5.0)
    writer.close()
    while os.read(pipe[0], 1 << 16):  # until its thread has closed its end
        continue


def test_bulk_waits_for_a_slow_reader_and_gives_up_when_it_goes():
    source, target = os.pipe()
    writer = remote_messages.FrameWriter(target)
    outcomes = []
    bulk = remote_messages.RelayData(call_id=1, data=bytes(1 << 20))

    def send():
        outcomes.extend(writer.send(bulk, bulk=True) for _ in range(6))

    thread = threading.Thread(target=send)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert len(outcomes) < 6
    os.close(source)
    thread.join(10)
    assert not thread.is_alive()
    assert writer.is_broken


READ_ONE = """
import sys
from torchmuster.core.net import messages

PARTS = "torchmuster.launcher.net.part_messages"
messages.decode(b'{"type":"Ping","number":1}')
assert PARTS not in sys.modules, "the core's own messages need no other room"
print(messages.decode(b'{"type":"AskStacks","ask_id":"one"}').ask_id, PARTS in sys.modules)
"""


def test_a_part_s_messages_are_imported_when_the_first_one_arrives():
    done = subprocess.run([sys.executable, "-c", READ_ONE], capture_output=True, text=True)
    assert done.stdout == "one True\n", done.stderr
