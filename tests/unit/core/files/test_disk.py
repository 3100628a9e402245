"""What is written to disk: in order, to the last line that fits, and who writes never waits."""

import os
import shutil
import stat
import sys
import threading
import time
from pathlib import Path

import pytest

from kit.command import SOURCE, ran
from kit.namespaces import small_disk, why_no_mount
from kit.waiting import wait_until
from torchmuster.core.files import disk as writing
from torchmuster.core.files.layout import RunDir

DEADLINE_S = 30.0
AT_ONCE_S = 30.0  # for 400 calls together, which take a few milliseconds
FULL = "No space left on device"


class Losses:
    """Notes what a writer says of its losses."""

    def __init__(self):
        self.said = []

    def __call__(self, lines, why):
        self.said.append((lines, why))

    @property
    def lines(self):
        return sum(lines for lines, _ in self.said)


@pytest.fixture
def losses():
    return Losses()


@pytest.fixture
def disk(losses):
    writer = writing.DiskWriter(on_loss=losses)
    writer.start()
    return writer


def link_to(target, path):
    """Make `path` another file from now on, as a disk that was full and has room again."""
    link = f"{path}.new"
    os.symlink(target, link)
    os.replace(link, path)


def put(disk, path, *blocks):
    """Append some blocks to a file, and wait until the disk has taken them."""
    for block in blocks:
        disk.append(str(path), block)
    assert disk.flush(DEADLINE_S)


def test_blocks_are_appended_in_order_and_folders_are_made(disk, tmp_path):
    path = tmp_path / "a" / "b" / "log"
    put(disk, path, *(b"%d\n" % i for i in range(1000)))

    assert path.read_bytes() == b"".join(b"%d\n" % i for i in range(1000))


def test_a_file_to_which_nothing_is_written_is_made_by_an_empty_block_only(disk, tmp_path):
    disk.append(str(tmp_path / "a" / "empty"), b"")
    disk.close_file(str(tmp_path / "never"))

    assert disk.flush(DEADLINE_S)
    assert (tmp_path / "a" / "empty").read_bytes() == b""
    assert not (tmp_path / "never").exists()


def test_a_file_that_exists_is_not_cut(disk, tmp_path):
    path = tmp_path / "log"
    path.write_text("before\n")
    put(disk, path, b"after\n")

    assert path.read_text() == "before\nafter\n"


def test_a_closed_file_can_be_appended_to_again(disk, tmp_path):
    path = tmp_path / "log"
    disk.append(str(path), b"1\n")
    disk.close_file(str(path))
    put(disk, path, b"2\n")

    assert path.read_bytes() == b"1\n2\n"


def test_close_gives_the_descriptor_back(disk, tmp_path):
    path = str(tmp_path / "log")

    def is_open():
        fds = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        return path in {os.readlink(fd) for fd in fds if os.path.lexists(fd)}

    put(disk, path, b"1\n")
    assert is_open()
    disk.close_file(path)
    assert disk.flush(DEADLINE_S)
    assert not is_open()


def test_replace_writes_the_whole_file_with_its_mode(disk, tmp_path):
    path = tmp_path / "result.json"
    path.write_text("a much longer text that was there before")
    disk.replace(str(path), b"new", mode=0o600)

    assert disk.flush(DEADLINE_S)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["result.json"]


def test_on_a_full_disk_lines_are_lost_counted_and_said(disk, losses):
    put(disk, "/dev/full", *(b"line %d\n" % i for i in range(5)), b"two\nlines\n")

    assert losses.lines == 7
    assert {why for _, why in losses.said} == {FULL}


def test_a_full_disk_that_has_room_again_gets_a_mark_in_the_place_of_the_loss(disk, tmp_path):
    path, real = tmp_path / "log", tmp_path / "real"
    link_to("/dev/full", path)
    put(disk, path, b"one\ntwo\n", b"three\n")
    link_to(real, path)
    put(disk, path, b"four\n", b"five\n")

    assert real.read_text() == f"\n[muster: 3 lines are lost here: {FULL}]\nfour\nfive\n"


def test_closing_a_file_on_a_full_disk_loses_no_line_more(disk, losses):
    disk.append("/dev/full", b"one\n")
    disk.close_file("/dev/full")

    assert disk.flush(DEADLINE_S)
    assert losses.lines == 1


def test_a_file_that_can_t_be_replaced_stays_and_the_reason_is_said(disk, losses, tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    disk.replace(str(path), b"new")

    assert disk.flush(DEADLINE_S)
    assert losses.said == [(0, "folder: Is a directory")]
    assert os.listdir(tmp_path) == ["folder"]


def test_a_file_in_the_way_of_the_folder_is_a_loss_like_any_other(disk, losses, tmp_path):
    (tmp_path / "logs").write_text("in the way")
    disk.append(str(tmp_path / "logs" / "rank-0.log"), b"line\n")
    disk.replace(str(tmp_path / "logs" / "result.json"), b"{}")

    assert disk.flush(DEADLINE_S)
    assert losses.said == [(1, "File exists"), (0, "result.json: Not a directory")]


def test_a_read_only_folder_is_a_loss_like_any_other(disk, losses):
    put(disk, "/sys/log", b"line\n")  # where nobody can make a file, not even root

    ((lines, why),) = losses.said
    assert lines == 1
    assert why in ("Permission denied", "Read-only file system")


def test_a_loss_in_one_file_leaves_the_others_whole(disk, losses, tmp_path):
    path = tmp_path / "log"
    for i in range(100):
        disk.append("/dev/full", b"lost\n")
        disk.append(str(path), b"%d\n" % i)

    assert disk.flush(DEADLINE_S)
    assert path.read_bytes() == b"".join(b"%d\n" % i for i in range(100))
    assert losses.lines == 100


def test_a_hung_disk_never_holds_the_caller_and_its_losses_are_said_at_once(disk, losses, tmp_path):
    path = str(tmp_path / "fifo")
    os.mkfifo(path)  # opening it for writing hangs until someone reads
    block = b"x" * ((1 << 20) - 1) + b"\n"
    began = time.monotonic()
    for _ in range(400):
        disk.append(path, block)
    disk.replace(path + ".json", b"{}")
    disk.close_file(path)

    # Nobody has read yet, so a call that waits for the disk does not return; and none waits a while.
    assert time.monotonic() - began < AT_ONCE_S
    assert not disk.flush(0.0)
    kept = writing.MAX_WAITING_BYTES >> 20
    assert losses.lines == 400 - kept
    assert {why for _, why in losses.said} == {"the disk was too slow"}

    with open(path, "rb") as reader:  # the disk is back
        written = reader.read()
    assert disk.flush(DEADLINE_S)
    mark = b"\n[muster: %d lines are lost here: the disk was too slow]\n" % (400 - kept)
    assert written == block * kept + mark
    assert losses.lines == 400 - kept


def test_flush_says_whether_it_was_in_time(disk, tmp_path):
    assert disk.flush(0.0)
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    disk.append(path, b"x")

    assert not disk.flush(0.01)
    with open(path, "rb") as reader:
        assert reader.read(1) == b"x"
    assert disk.flush(DEADLINE_S)


ON_A_TINY_DISK = """
import os, sys
from torchmuster.core.files.disk import DiskWriter
folder = sys.argv[1]
ballast, log = f"{folder}/ballast", f"{folder}/log"
with open(ballast, "wb") as file:
    file.write(bytes(32 << 10))
disk = DiskWriter(on_loss=lambda lines, why: print("lost", lines, why))
disk.start()
for i in range(100):
    disk.append(log, b"%05d" % i + b"x" * 1018 + b"\\n")
assert disk.flush(30.0)
os.unlink(ballast)
disk.append(log, b"after\\n")
assert disk.flush(30.0)
sys.stdout.flush()
with open(log, "rb") as file:
    sys.stdout.write(file.read().decode())
"""


@pytest.fixture
def tiny_disk(tmp_path):
    """The words that run a program with a file system of 64 KiB at its first argument."""
    if (reason := why_no_mount()) is not None:
        pytest.skip(reason)
    return small_disk(tmp_path, "64k")


def test_a_disk_that_fills_up_keeps_whole_lines_up_to_the_mark(tiny_disk, tmp_path):
    words = [*tiny_disk, sys.executable, "-c", ON_A_TINY_DISK, str(tmp_path)]
    done = ran(words, env={**os.environ, "PYTHONPATH": SOURCE})

    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("lost")]
    content = done.stdout.partition("00000x")[1] + done.stdout.partition("00000x")[2]
    kept = [line for line in content.splitlines() if len(line) == 1023]
    lost = 100 - len(kept)
    assert 0 < lost < 100
    assert said == [f"lost 1 {FULL}"] * lost
    assert [line[:5] for line in kept] == [f"{i:05d}" for i in range(len(kept))]
    assert content.endswith(f"\n[muster: {lost} lines are lost here: {FULL}]\nafter\n")


# A folder that is removed.


@pytest.fixture
def rooted(tmp_path, losses):
    writer = writing.DiskWriter(on_loss=losses, root=str(tmp_path / "run"))
    writer.start()
    return writer


def test_the_root_is_made_for_its_user_alone(rooted, tmp_path):
    put(rooted, tmp_path / "run" / "logs" / "a", b"1\n")
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_a_root_that_is_removed_is_said_at_once_and_not_made_again(rooted, losses, tmp_path):
    put(rooted, tmp_path / "run" / "logs" / "a", b"1\n")
    shutil.rmtree(tmp_path / "run")
    wait_until(lambda: losses.said, "the loss, though nothing is written")
    assert losses.said[0] == (0, f"{tmp_path}/run has been removed")
    rooted.append(str(tmp_path / "run" / "logs" / "a"), b"2\n")
    put(rooted, tmp_path / "run" / "logs" / "b", b"3\n")
    assert not (tmp_path / "run").exists()
    assert losses.lines == 2


def test_a_folder_in_the_place_of_the_root_is_not_the_root(rooted, losses, tmp_path):
    put(rooted, tmp_path / "run" / "a", b"1\n")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    (tmp_path / "run").mkdir()
    put(rooted, tmp_path / "run" / "b", b"2\n")
    assert not (tmp_path / "run" / "b").exists()
    assert losses.said


def test_a_file_that_is_removed_alone_is_made_again(rooted, losses, tmp_path):
    path = tmp_path / "run" / "a"
    put(rooted, path, b"1\n")
    path.unlink()

    def is_made_again():
        put(rooted, path, b"2\n")
        return path.exists()

    wait_until(is_made_again, "the file")
    assert path.read_bytes() == b"2\n"
    assert not losses.said


# A reader gets everything, however slow; who writes never waits for him.


BLOCK = b"".join(b"%09d\n" % n for n in range(100_000))


@pytest.fixture
def pipe():
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb") as reader, open(write_fd, "wb") as writer:
        yield reader, writer


def start_writer(fd, disk, folder):
    lost = []
    waiting = writing.Backlog(lambda: str(folder / "unread"), disk)
    writer = writing.PatientWriter(fd, waiting, lambda lines, why: lost.append((lines, why)))
    writer.start()
    return writer, lost


def test_what_a_reader_takes_late_is_what_was_put_in_its_order(tmp_path, disk, pipe):
    reader, end = pipe
    writer, lost = start_writer(end.fileno(), disk, tmp_path)

    for _ in range(8):
        writer.put(BLOCK)
    behind = [path.name for path in tmp_path.iterdir()]
    taken = b"".join(reader.read(len(BLOCK)) for _ in range(8))
    writer.flush()
    writer.put(b"again")
    writer.flush()

    assert taken == 8 * BLOCK
    assert reader.read(5) == b"again"
    assert lost == []
    assert behind == [] or behind == ["unread.0"]
    assert list(tmp_path.iterdir()) == []


def test_a_reader_who_has_gone_wants_nothing_and_keeps_nobody(tmp_path, disk, pipe):
    reader, end = pipe
    writer, lost = start_writer(end.fileno(), disk, tmp_path)

    for _ in range(8):
        writer.put(BLOCK)
    reader.close()
    writer.flush()
    writer.put(BLOCK)
    writer.flush()

    assert lost == []
    assert list(tmp_path.iterdir()) == []


def test_a_file_on_a_full_disk_lacks_lines_and_says_so(tmp_path, disk):
    with open("/dev/full", "wb") as full:
        writer, lost = start_writer(full.fileno(), disk, tmp_path)

        writer.put(b"one\ntwo\n")
        writer.flush()

    assert lost == [(2, "No space left on device")]


def test_an_end_that_waits_for_its_reader_says_so(tmp_path, disk, pipe, monkeypatch):
    monkeypatch.setattr(writing, "SAY_AFTER_S", 0.01)
    reader, end = pipe
    writer, _ = start_writer(end.fileno(), disk, tmp_path)
    said = []

    def read_all():
        said.append("waits")
        threading.Thread(target=reader.read, args=(len(BLOCK),)).start()

    writer.waits = read_all
    writer.put(BLOCK)
    writer.flush()

    assert said == ["waits"]


# Of very many attempts the logs of the first and of the last ones are kept.


def make(tmp_path, attempts):
    """Make the logs of four ranks of some attempts."""
    run_dir = RunDir(str(tmp_path))
    for attempt in range(attempts):
        os.makedirs(run_dir.attempt_logs(attempt))
        for rank in range(4):
            Path(run_dir.rank_log(attempt, rank)).write_text("x")
    return run_dir


def kept(run_dir):
    return sorted(int(name.removeprefix("attempt-")) for name in os.listdir(run_dir.logs))


def test_small_runs_keep_what_nobody_would_miss():
    assert writing.attempts_kept(2) == writing.MOST_FILES // 2
    assert writing.attempts_kept(4096) == 24
    assert writing.attempts_kept(10**6) == 20


def test_each_node_removes_what_its_ranks_have_left(tmp_path):
    run_dir, world = make(tmp_path, attempts=30), writing.MOST_FILES // 20
    for newest in range(30):
        old = writing.too_old(newest, world)
        for node in ((0, 1), (2, 3)) if old is not None else ():
            writing.remove_old(run_dir, old, node)
    assert kept(run_dir) == [0, *range(10, 30)]


def test_what_others_have_written_there_stays(tmp_path):
    run_dir, world = make(tmp_path, attempts=22), writing.MOST_FILES // 20
    assert writing.too_old(21, world) == 1
    writing.remove_old(run_dir, 1, (0, 1))
    assert sorted(os.listdir(run_dir.attempt_logs(1))) == ["rank-2.log", "rank-3.log"]
    writing.remove_old(run_dir, 1, (2, 3))
    assert 1 not in kept(run_dir)
    writing.remove_old(run_dir, 1, (0, 1))  # again, and of a node that never wrote
