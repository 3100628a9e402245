"""Files as they come: none may make a traceback, and none an endless read."""

import bz2
import gzip
import io
import lzma
import os
import random
import shutil
import subprocess
import sys
import tarfile
import threading
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.diagnose import logs
from torchmuster.diagnose import logs as sources
from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.judge import judge
from torchmuster.diagnose.explain.own_run import as_values, render_verdict
from torchmuster.diagnose.explain.reading import ends
from torchmuster.diagnose.explain.reading.ends import Notes, first_and_last
from torchmuster.diagnose.explain.reading.scan import read_sources
from torchmuster.diagnose.logs import Stream, by_hand, can_unpack, packing_of, read_logs, unpacked
from unit.diagnose.explain.logs import traceback_of

TEXT = traceback_of("ValueError: bad label 7")


def verdict_on(*paths):
    verdict = judge(Case(read_logs([str(path) for path in paths], year=2026)))
    assert "Traceback" not in render_verdict(verdict).partition("because:")[0]
    as_values(verdict)
    return verdict


def found(verdict):
    return verdict.first.error if verdict.first else ""


def write(folder, data, name="job.log"):
    path = folder / name
    path.write_bytes(data)
    return path


needs_program = pytest.mark.skipif(shutil.which("zstd") is None, reason="no program zstd")


def pack(data, *options):
    done = subprocess.run(["zstd", "-cq", *options], input=data, capture_output=True, check=True)
    return done.stdout


def add(archive, name, data):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


@given(data=st.binary(max_size=3000))
def test_any_bytes_are_read(tmp_path_factory, data):
    verdict_on(write(tmp_path_factory.mktemp("x"), data))


PIECES = st.sampled_from(
    [
        "Traceback (most recent call last):",
        '  File "a.py", line 3, in f',
        "ValueError: x",
        "[rank1]: ",
        "0: ",
        "n1: ",
        "\x1b[31merror\x1b[0m",
        "failed (exitcode: -9) local_rank: 0 (pid: 1)",
        "failed (exitcode: 99999999) local_rank: 1",
        "  exitcode  : -333 (pid: 3)",
        "SLURM_JOB_NODELIST=n[1-",
        "SLURM_NNODES=two",
        "Received 99 death signal",
        "[Errno 99999] x: 'y'",
        "I1301 99:99:99.1 a.py:1] x",
        "2026-99-99 10:00:00 x",
        "step 3 loss nan",
        "torchrun --nnodes=2 --rdzv-id= --rdzv-endpoint=",
        "keys: /default_pg/0//cpu//0/",
        "(10.0.0.1, 999999)",
        "\r",
        "\n",
        " ",
        "\u2028",
        "ü",
        "完成",
    ]
)


@given(pieces=st.lists(PIECES, max_size=60))
def test_any_mixture_of_what_logs_hold_is_judged(tmp_path_factory, pieces):
    verdict_on(write(tmp_path_factory.mktemp("x"), "".join(pieces).encode()))


def test_empty_file_is_said_to_say_nothing(tmp_path):
    verdict = verdict_on(write(tmp_path, b""))
    assert verdict.first is None
    assert not verdict.healthy


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-8-sig", "latin-1"])
def test_other_encodings_are_read(tmp_path, encoding):
    text = f"Größe\n{TEXT}"
    mark = b"\xff\xfe" if encoding == "utf-16-le" else b""
    assert "bad label 7" in found(verdict_on(write(tmp_path, mark + text.encode(encoding))))


def test_ends_of_lines_of_other_systems_are_ends_of_lines(tmp_path):
    path = write(tmp_path, TEXT.replace("\n", "\r\n").encode())
    assert found(verdict_on(path)) == "a process failed first: ValueError: bad label 7"


def test_colours_and_progress_bars_do_not_hide_an_error(tmp_path):
    bar = "".join(f"\r{k}%|###| {k}/100" for k in range(100)) + "\n"
    red = TEXT.replace("ValueError", "\x1b[31;1mValueError\x1b[0m")
    assert "bad label 7" in found(verdict_on(write(tmp_path, (bar + red).encode())))


@pytest.mark.parametrize("num_bars", [3, 40_000])
def test_lines_are_numbered_as_an_editor_numbers_them(tmp_path, num_bars):
    bar = "".join(f"\r{k}%|###| {k}/{num_bars}" for k in range(num_bars))
    text = f"started\r\n{bar}\nsaved\n{bar}\r{TEXT}{bar}\r\ndone\n"
    assert text.count("\r\n") == 2
    number = 1 + next(k for k, line in enumerate(text.split("\n")) if "bad label 7" in line)
    path = write(tmp_path, text.encode())
    (event,) = read_logs([str(path)], year=2026).events
    assert event.line.number == number
    record = read_sources(first_and_last(str(path), 1 << 10, 1 << 10), year=2026)
    assert record.logs[-1].last[-1].number == text.count("\n")
    assert record.logs[-1].last[-1].text == "done"


def test_binary_file_is_left_out_with_a_note(tmp_path):
    verdict = verdict_on(write(tmp_path, bytes(range(256)) * 40, "core.12"))
    (note,) = verdict.notes
    assert "core.12 is left out: it is not text: 9% of the beginning is control characters" in note


HOLE = b"\0" * 5000


@pytest.mark.parametrize(
    ("data", "number"),
    [
        (b"step 1\n\0step 2\n" + TEXT.encode(), 6),
        (HOLE * 3 + b"step 1\n" + TEXT.encode(), 5),
        (b"step 1\n" + HOLE + TEXT.encode() + HOLE, 5),
        (b"step 1\n" + HOLE + b"\n" + TEXT.encode(), 6),
        (b"step 1, lo" + HOLE + TEXT.encode(), 5),
        (b"step 1\n" * 9 + b"\0" * (3 << 20) + TEXT.encode(), 13),
    ],
)
def test_zeros_in_a_log_are_dropped_and_one_line_says_so(tmp_path, data, number):
    path = write(tmp_path, data)
    verdict = verdict_on(path)
    assert "bad label 7" in found(verdict)
    num_zeros = data.count(0)
    share = f"{num_zeros / len(data):.1%}"
    assert list(verdict.notes) == [f"{path}: {num_zeros:,} zero bytes in it ({share}) were dropped"]
    (event,) = read_logs([str(path)], year=2026).events
    assert event.line.number == number
    (source,) = first_and_last(str(path), 1 << 14, 4 << 20)
    text = b"".join(source.blocks)
    assert b"\nTraceback" in text
    assert b"\0" not in text


@pytest.mark.parametrize("size", [1, 7, 4999])
def test_a_hole_that_spans_reads_is_one(tmp_path, monkeypatch, size):
    monkeypatch.setattr(ends, "BLOCK_BYTES", size)
    data = HOLE + b"a\n" + HOLE + b"b\n" + HOLE + b"\nc" + HOLE + b"d\n" + HOLE
    opened = sources.open_sources([str(write(tmp_path, data))], Notes())
    assert [b"".join(source.blocks) for source in opened] == [b"a\nb\n\nc\nd\n"]


def test_small_numbers_with_zeros_between_are_not_text(tmp_path):
    data = b"".join(number.to_bytes(4, "little") for number in range(300, 2000))
    (note,) = verdict_on(write(tmp_path, b"weights of layer 1: " * 9 + data, "w.bin")).notes
    assert "it is not text" in note


def test_folder_is_read_with_all_below_it(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    write(tmp_path / "a" / "b", TEXT.encode())
    write(tmp_path, b"\0" * 100, "model.bin")
    assert "bad label 7" in found(verdict_on(tmp_path))


def test_gzip_is_read(tmp_path):
    assert "bad label 7" in found(verdict_on(write(tmp_path, gzip.compress(TEXT.encode()), "a.gz")))


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_archive_is_read_without_unpacking_it(tmp_path, mode):
    path = tmp_path / "logs.tar"
    with tarfile.open(path, mode) as archive:
        add(archive, "../../etc/n1.log", TEXT.encode())
    assert "bad label 7" in found(verdict_on(path))
    assert os.listdir(tmp_path) == ["logs.tar"]


@pytest.mark.parametrize("cut", [5, 20, 60])
def test_damaged_gzip_is_noted(tmp_path, cut):
    data = gzip.compress(TEXT.encode() * 3)
    assert verdict_on(write(tmp_path, data[:cut], "a.gz")).notes


def test_damaged_archive_is_noted(tmp_path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        add(archive, "n1.log", b"step 1\n" * 1000)
    assert verdict_on(write(tmp_path, buffer.getvalue()[:2000], "a.tar")).notes


def test_bomb_ends_at_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_UNPACKED_BYTES", 3 << 20)
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(64):
            file.write(b"all is well\n" * 87_000)
    record = read_logs([str(path)], year=2026)
    assert sum(log.num_bytes for log in record.logs) <= 3 << 20
    assert any("larger than" in note for note in record.notes.lines)


def test_endless_line_is_cut(tmp_path):
    record = read_logs([str(write(tmp_path, b"x" * (5 << 20)))], year=2026)
    assert sum(log.num_bytes for log in record.logs) < 1 << 20


def test_pipe_without_a_writer_is_left_out(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert verdict_on(path).notes


def test_file_that_may_not_be_read_is_noted(tmp_path):
    path = write(tmp_path, TEXT.encode())
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("root reads every file")
    assert verdict_on(path).notes


def test_missing_file_is_noted(tmp_path):
    assert verdict_on(tmp_path / "none.log").notes


def test_link_that_leads_out_of_a_folder_is_not_followed(tmp_path):
    outside = tmp_path / "outside.txt"
    outside.write_text(TEXT)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "job.log").symlink_to(outside)
    assert verdict_on(tmp_path / "logs").first is None


@pytest.mark.parametrize(
    "words",
    [
        "Kein Speicherplatz mehr auf dem Gerät verfügbar",
        "Auf dem Gerät ist kein Speicherplatz mehr verfügbar",
        "Aucun espace disponible sur le périphérique",
        "设备上没有空间",
    ],
)
@pytest.mark.parametrize("numbered", [False, True])
def test_full_disk_is_known_in_other_languages(tmp_path, words, numbered):
    raised = traceback_of(f"OSError: [Errno 28] {words}: '/scratch/a.pt'")
    line = raised if numbered else f"cp: a: {words}\n"
    assert verdict_on(write(tmp_path, line.encode())).first.cause == "disk-full"


@pytest.mark.slow
@pytest.mark.lab
def test_ten_million_lines_are_read_in_bounded_memory(tmp_path):
    import tracemalloc

    path = tmp_path / "long.log"
    block = "".join(f"2026-01-01 10:00:00 step {k} loss 0.{k:06d}\n" for k in range(100_000))
    with open(path, "w") as file:
        file.writelines(block for _ in range(100))
        file.write(TEXT)
    tracemalloc.start()
    try:
        verdict = verdict_on(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "bad label 7" in found(verdict)
    assert verdict.num_lines > 10_000_000
    assert peak < 100 << 20


def test_packed_log_within_an_archive_is_read(tmp_path):
    path = tmp_path / "logs.tgz"
    with tarfile.open(path, "w:gz") as archive:
        add(archive, "n1.log.gz", gzip.compress(TEXT.encode()))
    assert "bad label 7" in found(verdict_on(path))


@needs_program
def test_zstd_is_read_alone_in_an_archive_and_around_one(tmp_path):
    path = write(tmp_path, pack(TEXT.encode()), "a.zst")
    assert "bad label 7" in found(verdict_on(path))
    with tarfile.open(tmp_path / "b.tar", "w") as archive:
        add(archive, "n1.log.zst", pack(TEXT.encode()))
        add(archive, "n2.log", TEXT.encode())
    packed = pack((tmp_path / "b.tar").read_bytes())
    verdict = verdict_on(write(tmp_path, packed, "b.tar.zst"))
    assert "bad label 7" in found(verdict)
    assert verdict.num_files == 2
    assert not verdict.notes


def test_zstd_is_refused_with_the_command_that_reads_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "new_frame", lambda: None)
    monkeypatch.setenv("PATH", "")
    path = write(tmp_path, b"\x28\xb5\x2f\xfd" + b"x" * 50, "a.zst")
    (note,) = verdict_on(path).notes
    assert f"zstd -dc {path} | muster explain -" in note


def test_file_that_is_packed_again_and_again_ends(tmp_path):
    data = TEXT.encode()
    for _ in range(20):
        data = gzip.compress(data)
    (note,) = verdict_on(write(tmp_path, data, "a.gz")).notes
    assert "too many times" in note


def test_stream_in_small_parts_that_can_t_be_turned_back_is_read():
    class Slow(io.RawIOBase):
        data = gzip.compress(TEXT.encode())

        def read(self, num_bytes=-1):
            part, self.data = self.data[:7], self.data[7:]
            return part[: max(num_bytes, 0)]

    (event,) = read_logs([], year=2026, streams=[("stdin", Slow())]).events
    assert event.line.place == "stdin:4"


def test_archive_with_a_header_as_large_as_the_memory_is_a_bomb(tmp_path):
    path = tmp_path / "bomb.tar"
    header = tarfile.TarInfo("x")
    header.type = tarfile.XHDTYPE
    header.size = 3 << 30
    path.write_bytes(header.tobuf(tarfile.USTAR_FORMAT) + b"\0" * 4096)
    (note,) = verdict_on(path).notes
    assert "a header of 3221225472 bytes" in note


def test_archive_of_many_empty_files_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_MAX_MEMBERS", 50)
    path = tmp_path / "many.tar"
    with tarfile.open(path, "w") as archive:
        for number in range(60):
            add(archive, f"{number}.log", b"")
    assert any("more than 50 files" in note for note in verdict_on(path).notes)


def test_folder_of_too_many_files_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_FILES", 5)
    for number in range(8):
        write(tmp_path, b"step 1\n", f"{number}.log")
    record = read_logs([str(tmp_path)], year=2026)
    assert len(record.logs) == 5
    assert any("more than 5 files" in note for note in record.notes.lines)


def test_folder_that_links_to_itself_is_read_once(tmp_path):
    (tmp_path / "again").symlink_to(tmp_path)
    write(tmp_path, TEXT.encode())
    assert len(read_logs([str(tmp_path)], year=2026).logs) == 1


def test_file_that_grows_is_read_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(ends, "BLOCK_BYTES", 1 << 14)
    path = write(tmp_path, b"step 1\n" * 10_000)
    size = path.stat().st_size
    num_bytes = 0
    for source in sources.open_sources([str(path)], Notes()):
        for block in source.blocks:
            num_bytes += len(block)
            with path.open("ab") as more:
                more.write(block * 2)
    assert num_bytes == size


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/full"])
def test_device_is_not_read(device):
    (note,) = verdict_on(device).notes
    assert "this is no file" in note


def test_line_behind_one_without_an_end_has_its_number(tmp_path):
    data = b"x" * (5 << 20) + b"\n" + TEXT.encode()
    (event,) = read_logs([str(write(tmp_path, data))], year=2026).events
    assert event.line.number == 5


# Packed streams: a part at a time, bounded, and what is damaged ends with one error.


DATA = random.Random(1).randbytes(300_000) + b"a line of text\n" * 20_000
ROWS = b"a line of text, and another one\n" * 90_000
PACK = {"xz": lzma.compress, "bz2": bz2.compress, "zstd": pack}


def read_all(plain):
    try:
        return list(iter(lambda: plain.read(1000), b""))
    finally:
        if isinstance(plain, logs.ZstdProgram):
            plain.close()


@pytest.fixture
def no_module(monkeypatch):
    monkeypatch.setattr(logs, "new_frame", lambda: None)


@pytest.fixture(params=["xz", "bz2", "zstd by a module", "zstd by its program"])
def packing(request):
    """Return how it is packed; zstd is unpacked by what is there: a module of Python, a package, or the program."""
    name = request.param.partition(" ")[0]
    if name == "zstd" and shutil.which("zstd") is None:
        pytest.skip("no program zstd")
    if request.param == "zstd by its program":
        request.getfixturevalue("no_module")
    elif name == "zstd" and logs.new_frame() is None:
        pytest.skip("neither Python 3.14 nor the package zstandard")
    return name


def test_several_streams_after_each_other_are_one_file(packing):
    packed = PACK[packing](DATA) + PACK[packing](b"the end")
    parts = read_all(unpacked(packing, io.BytesIO(packed)))
    assert b"".join(parts) == DATA + b"the end"
    assert max(map(len, parts)) == 1000


@pytest.mark.parametrize("cut", [30, 5000, 200_000])
def test_file_that_ends_too_early_is_an_os_error(packing, cut):
    plain = unpacked(packing, io.BytesIO(PACK[packing](DATA)[:cut]))
    with pytest.raises(OSError, match="ends too early"):
        read_all(plain)


@pytest.mark.parametrize(("data", "begin", "end"), [(DATA, 2000, 2100), (ROWS, 20, 60)])
def test_damaged_file_is_an_os_error(packing, data, begin, end):
    packed = bytearray(PACK[packing](data))
    packed[begin:end] = bytes(end - begin)
    with pytest.raises(OSError, match=r"."):
        read_all(unpacked(packing, io.BytesIO(bytes(packed))))


def test_a_bomb_gives_no_more_than_asked_for(packing):
    plain = unpacked(packing, io.BytesIO(PACK[packing](bytes(8 << 20))))
    assert max(map(len, read_all(plain))) == 1000


def test_xz_file_that_asks_for_much_memory_is_refused():
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    with pytest.raises(OSError, match=r"(?i)memory"):
        unpacked("xz", io.BytesIO(lzma.compress(b"x", filters=filters))).read(10)


@pytest.mark.parametrize("packing", ["zstd by a module", "zstd by its program"], indirect=True)
def test_zstd_that_asks_for_much_memory_is_refused(packing):
    packed = pack(bytes(1 << 20), "--ultra", "--long=31", "--no-content-size")
    with pytest.raises(OSError, match=r"."):
        read_all(unpacked(packing, io.BytesIO(packed)))


def test_head_comes_before_the_rest_of_a_stream():
    stream = Stream(b"abc", io.BytesIO(b"def"))
    assert [stream.read(size) for size in (2, 2, 9, 9)] == [b"ab", b"c", b"def", b""]


def test_packing_is_known_by_the_first_bytes():
    assert packing_of(lzma.compress(b"x")) == "xz"
    assert packing_of(bz2.compress(b"x")) == "bz2"
    assert packing_of(b"step 1") is None


def test_command_to_type_quotes_the_name():
    assert by_hand("zstd", "a b.zst") == "zstd -dc 'a b.zst' | muster explain -"


@needs_program
def test_program_that_nobody_reads_any_more_ends(no_module):
    plain = unpacked("zstd", io.BytesIO(pack(DATA * 20)))
    assert plain.read(10) == DATA[:10]
    before = threading.active_count()
    plain.close()
    assert threading.active_count() <= before


def test_module_of_python_3_14_comes_first(monkeypatch):
    own = types.SimpleNamespace(ZstdDecompressor=lzma.LZMADecompressor)
    monkeypatch.setitem(sys.modules, "compression", types.ModuleType("compression"))
    monkeypatch.setitem(sys.modules, "compression.zstd", own)
    assert unpacked("zstd", io.BytesIO(lzma.compress(DATA))).read(len(DATA)) == DATA


def test_without_any_way_it_is_an_os_error(no_module, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert not can_unpack("zstd")
    with pytest.raises(OSError, match="zstd is not unpacked here"):
        unpacked("zstd", io.BytesIO(b"\x28\xb5\x2f\xfd"))
