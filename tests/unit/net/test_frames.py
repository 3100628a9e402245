"""Frames between client and courier: whole, bounded, and nothing outside of the run directory."""

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.net import frames
from torchmuster.net.frames import FrameError, FrameReader, FrameWriter, Kind


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for fd in ends:
        try:
            os.close(fd)
        except OSError:
            continue


@given(st.lists(st.tuples(st.integers(1, 255), st.binary(max_size=300)), max_size=20))
def test_what_is_packed_is_read_in_order(sent):
    source, target = os.pipe()
    with os.fdopen(source, "rb"):
        with os.fdopen(target, "wb") as file:
            file.write(b"".join(frames.pack(kind, payload) for kind, payload in sent))
        reader = FrameReader(source)
        found = []
        while (frame := reader.read(5.0)) is not None:
            found.append(frame)
    assert found == sent


def test_length_beyond_the_limit_is_refused_before_it_is_read(pipe):
    os.write(pipe[1], bytes([1]) + (frames.MAX_PAYLOAD_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(FrameError, match="bytes"):
        FrameReader(pipe[0]).read(5.0)


def test_silence_is_a_timeout(pipe):
    with pytest.raises(TimeoutError):
        FrameReader(pipe[0]).read(0.01)


def test_noise_before_the_marker_is_set_aside(pipe):
    os.write(pipe[1], b"Welcome!\nmodule loaded\nMARK\n" + frames.pack(Kind.PONG))
    reader = FrameReader(pipe[0])
    assert reader.read_until(b"MARK", 1000, 5.0) == b"Welcome!\nmodule loaded\n"
    assert reader.read(5.0) == (Kind.PONG, b"")


def test_endless_noise_is_refused(pipe):
    os.write(pipe[1], b"x" * 2000)
    with pytest.raises(FrameError, match="1000"):
        FrameReader(pipe[0]).read_until(b"MARK", 1000, 5.0)


def test_file_frame_comes_back_as_it_was():
    kind, payload = Kind.FILE, frames.pack_file("logs/a b.log", 7, b"data")[5:]
    assert kind == 50
    assert frames.read_file(payload) == ("logs/a b.log", 7, b"data")


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "logs/../../x", "a//b", "./a", "a\0b"])
def test_file_outside_of_the_run_directory_is_refused(path):
    with pytest.raises(FrameError):
        frames.read_file(frames.pack_file(path, 0, b"")[5:])


@given(st.binary(max_size=64))
def test_any_bytes_are_a_file_frame_or_refused(payload):
    try:
        path, offset, _ = frames.read_file(payload)
    except FrameError:
        return
    assert not path.startswith("/")
    assert ".." not in path.split("/")
    assert offset >= 0


@pytest.mark.parametrize("payload", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(payload):
    with pytest.raises(FrameError):
        frames.read_json(payload)


def test_writer_pings_while_nothing_else_is_sent(pipe):
    writer = FrameWriter(pipe[1])
    writer.start()
    writer.ping_every(0.01)
    reader = FrameReader(pipe[0])
    assert [reader.read(5.0) for _ in range(3)] == [(Kind.PING, b"")] * 3
    writer.close()
    while reader.read(5.0) is not None:
        continue


def test_bulk_waits_for_a_slow_reader_and_gives_up_when_it_goes():
    source, target = os.pipe()
    writer = FrameWriter(target)
    writer.start()
    outcomes = []

    def send():
        outcomes.extend(writer.send_bulk(frames.pack(1, bytes(1 << 20))) for _ in range(6))

    thread = threading.Thread(target=send)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert len(outcomes) < 6
    os.close(source)
    thread.join(10)
    assert not thread.is_alive()
    assert writer.is_broken
