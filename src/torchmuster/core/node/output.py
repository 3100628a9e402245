"""The output of workers: drained from their pipes, kept in files, and partly shown.

A worker must never wait for us, so pipes are read in large blocks, and each block goes straight to
the disk writer. The terminal is best effort: it gets at most `SHOWN_BYTES_PER_S` of each rank. From
the first line that is left out, it gets whole lines only, with the number of lines left out. A file
or a pipe gets every line.

A rank that is shown on a terminal writes to one: a pty that passes bytes unchanged (no carriage
returns, no echo) and is no controlling terminal, so muster alone handles Ctrl-C and hang-ups.
"""

import asyncio
import codecs
import contextlib
import fcntl
import os
import string
import struct
import termios
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.model import contract
from torchmuster.core.model.lease import LEASE_S
from torchmuster.core.model.lines import Terminal, last_state
from torchmuster.core.model.ranks import NodeRanks
from torchmuster.core.net import messages
from torchmuster.core.node.head_link import HeadLink
from torchmuster.core.node.options import AgentOptions

# Where an agent prints: its log in the run directory, or the terminal of `muster torchrun`.
#
# Neither may ever block the event loop: a log goes through the disk writer, a terminal through
# `files.terminal`.


class Voice(Protocol):
    """Prints sentences and output without blocking."""

    def say(self, sentence: str) -> None:
        """Print a sentence from muster."""

    def print(self, text: str) -> None:
        """Print text unchanged."""

    def show(self, rank: int, stream: int, text: str, left_out: int) -> None:
        """Print a rank's output."""

    def prefix_rank(self, rank: int, prefix: str) -> None:
        """Start each shown line of a rank with this text."""

    def flush(self, timeout_s: float) -> None:
        """Wait until everything is printed or the time is up."""


@dataclass(slots=True)
class LogVoice:
    """Prints into a file of the run directory."""

    path: str
    disk: DiskWriter

    def say(self, sentence: str) -> None:
        """Append one line."""
        self.disk.append(self.path, f"muster: {sentence}\n".encode())

    def print(self, text: str) -> None:
        """Append the text."""
        self.disk.append(self.path, text.encode())

    def show(self, rank: int, stream: int, text: str, left_out: int) -> None:
        """Do nothing: the ranks have their own logs."""

    def prefix_rank(self, rank: int, prefix: str) -> None:
        """Do nothing: the ranks have their own logs."""

    def flush(self, timeout_s: float) -> None:
        """Wait for the disk."""
        self.disk.flush(timeout_s)


TAIL_LINES = 20
TAIL_BYTES = 16 << 10
LINE_CHARACTERS = 500
SHOWN_BYTES_PER_S = 1 << 20
_RESUME_BYTES = SHOWN_BYTES_PER_S * 3 // 4
_BLOCK_BYTES = 256 << 10
_PIPE_BYTES = 1 << 20
_CONGESTION_POLL_S = 0.01
_F_SETPIPE_SZ = 1031  # linux/fcntl.h

# rank, stream (1 or 2), text, lines left out before it
Show = Callable[[int, int, str, int], None]


def open_pipe() -> tuple[int, int]:
    """Return the (read, write) ends of a large pipe; only the read end is non-blocking."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read_fd, False)
    with contextlib.suppress(OSError):  # the user may have reached the limit on pipe memory
        fcntl.fcntl(read_fd, _F_SETPIPE_SZ, _PIPE_BYTES)
    return read_fd, write_fd


def open_terminal(terminal: Terminal) -> tuple[int, int]:
    """Return the (read, write) ends of a pty of this size that passes bytes unchanged.

    Raises:
        OSError: The system has no free pty.
    """
    read_fd, write_fd = os.openpty()  # does not become our controlling terminal
    os.set_blocking(read_fd, False)
    mode = termios.tcgetattr(write_fd)
    mode[1] &= ~termios.OPOST
    mode[3] &= ~termios.ECHO
    termios.tcsetattr(write_fd, termios.TCSANOW, mode)
    _set_size(write_fd, terminal)
    return read_fd, write_fd


def _set_size(fd: int, terminal: Terminal) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("4H", terminal.rows, terminal.columns, 0, 0))


@dataclass(slots=True)
class _Allowance:
    """A token bucket: how much of one rank's output the terminal may still get."""

    left: float = SHOWN_BYTES_PER_S
    at: float = field(default_factory=time.monotonic)

    def take(self, num_bytes: int, *, at_least: int = 0) -> bool:
        now = time.monotonic()
        self.left = min(SHOWN_BYTES_PER_S, self.left + (now - self.at) * SHOWN_BYTES_PER_S)
        self.at = now
        if max(num_bytes, at_least) > self.left:
            return False
        self.left -= num_bytes
        return True


class RankOutput:
    """The two streams of one rank in one attempt.

    Args:
        every_line: The streams that must be shown without gaps.
        must_wait: Returns whether the reader of the shown output is slow, so that waiting helps.
    """

    def __init__(
        self,
        rank: int,
        log_path: str,
        disk: DiskWriter,
        show: Show | None,
        shown: frozenset[int],
        copies: dict[int, str],
        terminal: Terminal | None = None,
        *,
        every_line: Collection[int] = (),
        must_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        self.rank = rank
        self.problem: str | None = None  # a sentence for the user
        self._terminal = terminal
        self._shown = shown
        self._every_line, self._must_wait = every_line, must_wait
        self._copies = copies
        self.log_path = log_path
        self._disk = disk
        self._show = show
        self._recent = b""
        self._allowance = _Allowance()
        self._streams: dict[int, _Stream] = {}

    def open(self) -> tuple[int, int]:
        """Return the write ends for stdout and stderr; the caller closes them."""
        ends = self._open_terminal()
        for number in (1, 2):
            if number not in ends:
                read_fd, ends[number] = open_pipe()
                self._listen(read_fd, number)
        return ends[1], ends[2]

    def _open_terminal(self) -> dict[int, int]:
        """Return the write ends of the streams that belong on a terminal.

        They share one pty, which keeps their order. A stream that is also saved separately
        (torchrun's -r and -t) is a pipe, as under torchrun.
        """
        if self._terminal is None or self._show is None:
            return {}
        numbers = sorted(self._terminal.streams & self._shown - self._copies.keys())
        if not numbers:
            return {}
        try:
            read_fd, write_fd = open_terminal(self._terminal)
        except OSError as error:
            self.problem = f"rank {self.rank} writes to a pipe, not to a terminal: {error.strerror}"
            return {}
        self._listen(read_fd, numbers[0], is_terminal=True)
        return {number: os.dup(write_fd) if i else write_fd for i, number in enumerate(numbers)}

    def _listen(self, read_fd: int, number: int, *, is_terminal: bool = False) -> None:
        # A file or a pipe gets the rank's own bytes, in any encoding.
        errors = "surrogateescape" if number in self._every_line else "replace"
        self._streams[read_fd] = _Stream(number, errors, is_terminal=is_terminal)
        asyncio.get_running_loop().add_reader(read_fd, self._read_unless_congested, read_fd)

    def resize(self, terminal: Terminal) -> None:
        """Apply a new size of the terminal."""
        for fd, stream in self._streams.items():
            if stream.is_terminal:
                _set_size(fd, terminal)

    def mute(self) -> None:
        """Show nothing more, because this rank's failure is an echo; still write the log."""
        self._shown = frozenset()

    def drain(self) -> None:
        """Read what is in the pipes now: the worker has ended, but its children may still write."""
        for fd in list(self._streams):
            for _ in range(2 * _PIPE_BYTES // _BLOCK_BYTES):
                if fd not in self._streams or not self._read(fd):
                    break

    def close(self) -> None:
        """Drain and close the pipes; a child that the worker left then writes to a broken pipe."""
        self.drain()
        for fd in list(self._streams):
            self._close(fd)
        for path in (self.log_path, *self._copies.values()):
            self._disk.close_file(path)

    def tail(self) -> tuple[str, ...]:
        """Return the last lines of both streams, in order of arrival."""
        text = self._recent.decode(errors="replace").removesuffix("\n")
        lines = [last_state(line) for line in text.split("\n")] if text else []
        return tuple(line[:LINE_CHARACTERS] for line in lines[-TAIL_LINES:])

    def _read_unless_congested(self, fd: int) -> None:
        if not (self._disk.is_congested or self._must_wait()):
            self._read(fd)
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(fd)
        loop.call_later(_CONGESTION_POLL_S, self._read_again, fd)

    def _read_again(self, fd: int) -> None:
        if fd in self._streams:
            asyncio.get_running_loop().add_reader(fd, self._read_unless_congested, fd)

    def _read(self, fd: int) -> bool:
        try:
            data = os.read(fd, _BLOCK_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data and self._streams[fd].is_terminal:
            data += _read_more(fd)
        if not data:
            self._close(fd)
            return False
        self._disk.append(self.log_path, data)
        self._recent = (self._recent + data[-TAIL_BYTES:])[-TAIL_BYTES:]
        number = self._streams[fd].number
        if number in self._copies:
            self._disk.append(self._copies[number], data)
        if self._show is not None and number in self._shown:
            self._show_block(self._streams[fd], data)
        return True

    def _show_block(self, stream: "_Stream", data: bytes) -> None:
        is_spared = stream.number not in self._every_line
        if is_spared and (stream.skips or not self._allowance.take(len(data))):
            data = self._leave_out(stream, data)
            if not data:
                return
        text = stream.decoder.decode(data)
        if text and self._show is not None:
            self._show(self.rank, stream.number, text, stream.left_out)
            stream.left_out = 0

    def _leave_out(self, stream: "_Stream", data: bytes) -> bytes:
        """Return the whole lines of a block that may be shown, and leave out the rest."""
        _, newline, rest = data.partition(b"\n")
        # Wait until a good part may be shown, so that a flood doesn't get a gap note for each
        # block.
        if stream.skips and newline and self._allowance.take(len(rest), at_least=_RESUME_BYTES):
            stream.skips = False
            stream.left_out += 1
            return rest
        stream.skips = True
        stream.left_out += data.count(b"\n")
        stream.decoder.reset()
        return b""

    def _close(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        stream = self._streams.pop(fd)
        left_out = stream.left_out or int(stream.skips)
        rest = stream.decoder.decode(b"", final=True)
        if (left_out or rest) and self._show is not None and stream.number in self._shown:
            self._show(self.rank, stream.number, rest, left_out)


def _read_more(fd: int) -> bytes:
    """Read more from a terminal, which returns at most 4 KiB at a time."""
    blocks: list[bytes] = []
    with contextlib.suppress(OSError):  # no more data now, or ever: the next read tells
        while len(blocks) < _BLOCK_BYTES >> 12 and (data := os.read(fd, _BLOCK_BYTES)):
            blocks.append(data)
    return b"".join(blocks)


class _Stream:
    """The state of one stream."""

    def __init__(self, number: int, errors: str, *, is_terminal: bool) -> None:
        self.number = number
        self.is_terminal = is_terminal
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors=errors)
        self.left_out = 0
        self.skips = False  # until the end of a line


# Where this node's output is shown: on this terminal, or by the head's clients.
#
# Output for a terminal is left out when the connection to the head is full. Output for a file or a
# pipe waits here, and then the workers wait, as for a disk, as long as the head accepts some. They
# never wait for a reader that has stalled.


_MAX_UNSENT_BYTES = 1 << 20
_MAX_WAITING_BYTES = 32 << 20
_CONGESTED_BYTES = 1 << 20
_PATIENCE_S = 0.5
_LOOK_AGAIN_S = 0.01
_MAX_TEXT = 1 << 16


class Showing:
    """Shows the output of workers, here or through the head.

    Args:
        options: The agent's options.
        link: The agent's connection to the head.
        voice: This node's terminal or log.
    """

    def __init__(self, options: AgentOptions, link: HeadLink, voice: Voice) -> None:
        self._options, self._link, self._voice = options, link, voice
        self._lost_lines: set[str] = set()  # the reasons that the user knows
        self._not_shown: dict[int, int] = {}  # lines left out per rank because the channel was full
        self._waiting: deque[messages.Output] = deque()
        self._waiting_bytes = 0
        self._moved_at = 0.0
        self._sends_again = False

    def prefix_lines(self, ranks: NodeRanks, environment: dict[str, str]) -> None:
        """Prefix the lines shown here as torchrun's template says, if there is one."""
        template = environment.get(contract.PREFIX_VARIABLE)
        if template is None or not self._options.local_show:
            return
        for local_rank in range(ranks.num_workers):
            rank, role = ranks.first_rank + local_rank, self._options.plan.role
            words = {"role_name": role, "rank": rank, "local_rank": local_rank}
            self._voice.prefix_rank(rank, string.Template(template).safe_substitute(words))

    def show(self, attempt: int, rank: int, stream: int, text: str, left_out: int) -> None:
        """Show output of a rank in an attempt; `left_out` lines are missing before it."""
        if self._options.local_show:
            self._voice.show(rank, stream, text, left_out)
            return
        if not self._has_room(stream):
            self._not_shown[rank] = self._not_shown.get(rank, 0) + left_out + text.count("\n")
            return
        left_out += self._not_shown.pop(rank, 0)
        for start in range(0, len(text) or 1, _MAX_TEXT):
            output = messages.Output(
                rank=rank,
                attempt=attempt,
                stream=stream,
                text=text[start : start + _MAX_TEXT],
                dropped_lines=left_out if start == 0 else 0,
            )
            self._waiting.append(output)
            self._waiting_bytes += len(output.text)
        self._send_waiting()

    def _has_room(self, stream: int) -> bool:
        if stream in self._options.plan.every_line:
            return self._waiting_bytes <= _MAX_WAITING_BYTES
        channel = self._link.channel
        return channel is not None and channel.unsent_bytes <= _MAX_UNSENT_BYTES

    def _send_waiting(self) -> None:
        channel = self._link.channel
        while self._waiting and channel is not None and channel.unsent_bytes <= _MAX_UNSENT_BYTES:
            output = self._waiting.popleft()
            self._waiting_bytes -= len(output.text)
            self._moved_at = time.monotonic()
            channel.send_nowait(output)
        if self._waiting and not self._sends_again:
            self._sends_again = True
            asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._send_again)

    def _send_again(self) -> None:
        self._sends_again = False
        self._send_waiting()

    def is_congested(self) -> bool:
        """Return whether the head accepts output, but too slowly, so that a short wait helps."""
        return self._waiting_bytes > _CONGESTED_BYTES and self._has_moved(_PATIENCE_S)

    def _has_moved(self, within_s: float) -> bool:
        return time.monotonic() - self._moved_at < within_s

    async def settle(self) -> None:
        """Wait until the head has the output so far, or has accepted nothing for a lease."""
        while self._waiting and self._has_moved(LEASE_S):
            await asyncio.sleep(_LOOK_AGAIN_S)

    def lose(self, lines: int, why: str) -> None:
        """Count log lines that the disk did not accept; tell the user each new reason."""
        if why in self._lost_lines:
            notice = messages.Notice(text="", logs_lost_lines=lines)
        else:
            text = f"logs are being lost on {self._options.host}: {why}; the job continues"
            notice = messages.Notice(text=text, level="warning", logs_lost_lines=lines)
        self._lost_lines.add(why)
        self._link.send(notice)
