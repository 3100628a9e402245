import asyncio
import hashlib
import os
import subprocess
import sys
import threading

import pytest

from kit.work import rss_bytes
from torchmuster.core.model import lines as screen
from torchmuster.core.model.text import as_bytes
from torchmuster.core.node.output import (
    LINE_CHARACTERS,
    SHOWN_BYTES_PER_S,
    TAIL_LINES,
    LogVoice,
    RankOutput,
)

DEADLINE_S = 60.0


@pytest.fixture
def log(tmp_path):
    return tmp_path / "logs" / "rank-0.log"


class Terminal:
    """Notes what is shown."""

    def __init__(self):
        self.pieces = []

    def __call__(self, rank, stream, text, left_out):
        self.pieces.append((stream, text, left_out))

    @property
    def text(self):
        return "".join(text for _, text, _ in self.pieces)

    @property
    def left_out(self):
        return sum(left_out for _, _, left_out in self.pieces)


async def take_all(output, write):
    """Let `write(stdout, stderr)` write in a thread until it returns, then take the rest."""
    stdout, stderr = output.open()

    def work():
        try:
            write(stdout, stderr)
        finally:
            os.close(stdout)
            os.close(stderr)

    async with asyncio.timeout(DEADLINE_S):
        await asyncio.to_thread(work)
    output.close()


BOTH = frozenset({1, 2})


def output_of(write, disk, log, show=None, *screen, shown=BOTH, copies=None, rank=0, **more):
    output = RankOutput(rank, str(log), disk, show, shown, copies or {}, *screen, **more)
    asyncio.run(take_all(output, write))
    assert disk.flush(DEADLINE_S)
    return output


def write_all(fd, data):
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def test_all_of_both_streams_is_in_the_log(disk, log):
    def write(stdout, stderr):
        write_all(stdout, b"out\n")
        write_all(stderr, b"err\xff\n")

    output_of(write, disk, log)

    assert sorted(log.read_bytes().splitlines()) == [b"err\xff", b"out"]


def out_and_err(stdout, stderr):
    write_all(stdout, b"out")
    write_all(stderr, b"err")


def test_what_is_shown_says_its_stream(disk, log):
    terminal = Terminal()

    output_of(out_and_err, disk, log, terminal)

    assert sorted(terminal.pieces) == [(1, "out", 0), (2, "err", 0)]


def test_a_stream_that_is_not_shown_is_in_the_log_alone(disk, log):
    terminal = Terminal()

    output_of(out_and_err, disk, log, terminal, shown=frozenset({2}))

    assert terminal.pieces == [(2, "err", 0)]
    assert sorted(log.read_bytes()) == sorted(b"outerr")


def test_a_second_file_gets_its_stream(disk, log, tmp_path):
    copy = tmp_path / "copies" / "stderr.log"

    output_of(out_and_err, disk, log, copies={2: str(copy)})

    assert copy.read_bytes() == b"err"


def test_a_character_that_comes_in_two_parts_is_shown_whole(disk, log):
    terminal = Terminal()
    second_half = threading.Event()

    def show(rank, stream, text, left_out):
        terminal(rank, stream, text, left_out)
        second_half.set()

    def write(stdout, stderr):
        write_all(stdout, b"a\xc3")
        assert second_half.wait(DEADLINE_S)
        write_all(stdout, b"\xbc\n")

    output_of(write, disk, log, show)

    assert terminal.text == "aü\n"


@pytest.mark.parametrize("number", [1, 2])
def test_a_file_or_a_pipe_gets_the_bytes_of_any_encoding(disk, log, number):
    terminal, written = Terminal(), bytes(range(256)) * 3 + b"caf\xc3"

    def write(stdout, stderr):
        for fd in (stdout, stderr):
            write_all(fd, written)

    output_of(write, disk, log, terminal, every_line=(number,))

    found = "".join(text for stream, text, _ in terminal.pieces if stream == number)
    assert as_bytes(found) == written
    others = "".join(text for stream, text, _ in terminal.pieces if stream != number)
    assert "\ufffd" in others
    assert others.encode()  # it has no halves of characters


def test_the_tail_is_the_last_lines_each_cut_to_a_length(disk, log):
    lines = [f"line {i}" for i in range(100)] + ["x" * 1000]

    output = output_of(lambda out, err: write_all(out, "\n".join(lines).encode()), disk, log)

    assert output.tail() == (*lines[-TAIL_LINES:-1], "x" * LINE_CHARACTERS)


def test_a_rank_that_wrote_nothing_has_no_tail_and_no_log(disk, log):
    output = output_of(lambda out, err: None, disk, log)

    assert output.tail() == ()
    assert not log.exists()


async def test_what_a_muted_rank_writes_is_in_the_log_alone(disk, log):
    terminal = Terminal()

    output = RankOutput(0, str(log), disk, terminal, BOTH, {})
    output.mute()
    await take_all(output, lambda out, err: write_all(out, b"echo\n"))

    assert disk.flush(DEADLINE_S)
    assert terminal.pieces == []
    assert log.read_bytes() == b"echo\n"


def test_the_terminal_gets_a_flood_in_part_and_hears_of_every_line_that_it_did_not_get(disk, log):
    terminal = Terminal()
    lines = b"".join(b"%07d\n" % i for i in range(1_000_000))

    output_of(lambda out, err: write_all(out, lines), disk, log, terminal)

    assert SHOWN_BYTES_PER_S // 2 < len(terminal.text) < len(lines)
    assert terminal.text.count("\n") + terminal.left_out == 1_000_000
    assert log.stat().st_size == len(lines)


async def test_after_a_gap_the_terminal_goes_on_with_a_whole_line(disk, log):
    terminal = Terminal()
    output = RankOutput(0, str(log), disk, terminal, frozenset({1}), {})

    stdout, stderr = output.open()
    os.close(stderr)
    async with asyncio.timeout(DEADLINE_S):
        long_line = b"x" * (3 * SHOWN_BYTES_PER_S) + b"\n"
        await asyncio.to_thread(write_all, stdout, long_line)
        while not any(text.endswith("whole\n") for _, text, _ in terminal.pieces):
            await asyncio.to_thread(write_all, stdout, b"whole\n")
    os.close(stdout)
    output.close()

    first_gap = next(i for i, piece in enumerate(terminal.pieces) if piece[2])
    after = "".join(text for _, text, _ in terminal.pieces[first_gap:])
    assert set(after.splitlines()) == {"whole"}


def test_what_was_left_out_at_the_very_end_is_said_too(disk, log):
    terminal = Terminal()

    output_of(lambda out, err: write_all(out, b"x" * (3 * SHOWN_BYTES_PER_S)), disk, log, terminal)

    assert terminal.pieces[-1] == (1, "", 1)


FLOOD = """
import os, sys
block = (bytes(range(33, 127)) * 10 + b"\\n") * 1000
for _ in range(int(sys.argv[1])):
    assert os.write(1, block) == len(block)
"""
FLOOD_BLOCK = (bytes(range(33, 127)) * 10 + b"\n") * 1000
NUM_BLOCKS = 107  # 100 MB


def start_flood(stdout, stderr):
    words = [sys.executable, "-IS", "-c", FLOOD, str(NUM_BLOCKS)]
    return subprocess.Popen(words, stdout=stdout, stderr=stderr)


def test_a_hundred_megabytes_are_in_the_log_to_the_last_byte_and_not_in_memory(disk, log):
    async def check():
        output = RankOutput(0, str(log), disk, Terminal(), frozenset(), {})
        stdout, stderr = output.open()
        before = rss_bytes()
        worker = start_flood(stdout, stderr)
        os.close(stdout)
        os.close(stderr)
        most = before
        async with asyncio.timeout(DEADLINE_S):
            while worker.poll() is None:
                most = max(most, rss_bytes())
                await asyncio.sleep(0)
        output.close()
        assert worker.returncode == 0
        assert most - before < 60 << 20
        return output

    output = asyncio.run(check())
    assert disk.flush(DEADLINE_S)

    with open(log, "rb") as file:
        written = hashlib.file_digest(file, "sha256")
    assert log.stat().st_size == NUM_BLOCKS * len(FLOOD_BLOCK)
    assert written.digest() == hashlib.sha256(FLOOD_BLOCK * NUM_BLOCKS).digest()
    assert len(output.tail()) > 10


async def test_a_child_that_the_worker_left_behind_writes_into_a_broken_pipe(disk, log):
    output = RankOutput(0, str(log), disk, None, frozenset(), {})
    stdout, stderr = output.open()
    output.close()
    with pytest.raises(BrokenPipeError):
        os.write(stdout, b"late")
    os.close(stdout)
    os.close(stderr)


SCREEN = screen.Terminal(streams=BOTH, columns=111, rows=33)


def test_on_a_terminal_both_streams_keep_their_order_and_every_byte(disk, log):
    shown, seen = Terminal(), {}

    def write(stdout, stderr):
        seen.update(
            size=os.get_terminal_size(stderr), same=os.ttyname(stdout) == os.ttyname(stderr)
        )
        for i in range(3000):
            write_all(stdout, b"\x1b[31m%d\n\r" % i)
            write_all(stderr, b"!\t\n")

    output_of(write, disk, log, shown, SCREEN)

    assert seen == {"size": (111, 33), "same": True}
    assert log.read_bytes() == b"".join(b"\x1b[31m%d\n\r!\t\n" % i for i in range(3000))
    assert shown.text.encode() == log.read_bytes()


def test_a_stream_that_is_kept_apart_or_not_shown_is_a_pipe(disk, log, tmp_path):
    are = []

    def write(stdout, stderr):
        are.append((os.isatty(stdout), os.isatty(stderr)))

    copies = {2: str(tmp_path / "err")}
    for shown, apart in ((BOTH, copies), (frozenset({2}), {}), (frozenset(), {})):
        output_of(write, disk, log, Terminal(), SCREEN, shown=shown, copies=apart)

    assert are == [(True, False), (False, True), (False, False)]


def test_a_system_without_terminals_gives_a_pipe_and_says_so(disk, log, monkeypatch):
    def full():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "openpty", full)
    output = output_of(
        lambda out, err: write_all(out, b"x\n"), disk, log, Terminal(), SCREEN, rank=3
    )

    assert log.read_bytes() == b"x\n"
    assert output.problem == ("rank 3 writes to a pipe, not to a terminal: No space left on device")


def test_of_a_progress_bar_the_tail_has_the_last_state(disk, log):
    output = output_of(lambda out, err: write_all(err, b"a\n\r10%\r20%\nend\n"), disk, log)

    assert output.tail() == ("a", "20%", "end")


def test_a_voice_without_terminal_speaks_into_its_log(disk, tmp_path):
    path = tmp_path / "agents" / "n1.log"
    voice = LogVoice(str(path), disk)

    voice.say("joined")
    voice.show(0, 1, "the rank has a log of its own\n", 0)
    voice.print("error: x\n")
    voice.flush(30.0)

    assert path.read_text() == "muster: joined\nerror: x\n"
