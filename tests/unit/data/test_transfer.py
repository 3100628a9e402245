import os

import pytest

from torchmuster.data.faults import DataError
from torchmuster.data.record import DownloadRecord
from torchmuster.data.transfer import download, upload
from torchmuster.data.urls import open_place


def test_a_folder_comes_back_as_it_was_sent(place_url, folder, tree, tmp_path):
    upload(str(folder), place_url)
    moved = download(place_url, str(tmp_path / "back"))

    assert tree(tmp_path / "back") == tree(folder)
    assert (moved.num_files, moved.num_skipped) == (3, 0)
    assert download(place_url, str(tmp_path / "back")).num_skipped == 3


def test_local_copies_keep_their_modes_and_share_no_inode(folder, tmp_path):
    download(str(folder), str(tmp_path / "back"))

    ours, theirs = os.stat(tmp_path / "back/deep/run.sh"), os.stat(folder / "deep/run.sh")
    assert ours.st_mode == theirs.st_mode
    assert ours.st_ino != theirs.st_ino


def test_failures_that_may_pass_are_tried_again(place_url, folder, tree, tmp_path, flaky):
    place = open_place(place_url)
    errors = [ConnectionError("reset"), TimeoutError("slow")]
    upload(str(folder), flaky(place, put=errors, entries=[ConnectionError("reset")]))
    download(flaky(place, read=errors, stat=errors, entries=errors), str(tmp_path / "back"))

    assert tree(tmp_path / "back") == tree(folder)


def test_denied_is_said_at_once_and_not_tried_again(place_url, folder, flaky):
    place = flaky(open_place(place_url), put=[PermissionError("no")] * 3)

    with pytest.raises(DataError, match="access was denied") as caught:
        upload(str(folder), place, num_parallel=1)

    assert not caught.value.may_pass
    assert open_place(place_url).entries() == []


def test_a_range_that_comes_short_is_asked_for_again(tmp_path):
    place = open_place("memory://short/x")
    place.write("a", b"0123456789")

    class Short:
        url = place.url
        asked = 0

        def read(self, name, begin=0, end=None):
            self.asked += 1
            return place.read(name, begin, min(begin + 4, end) if end else end)

        def __getattr__(self, name):
            return getattr(place, name)

    download(Short(), str(tmp_path / "back"))

    assert (tmp_path / "back/a").read_bytes() == b"0123456789"


def test_an_etag_that_never_fits_is_believed_only_after_two_equal_reads(tmp_path):
    from dataclasses import replace

    place, notes, reads = open_place("memory://etag/x"), [], []
    place.write("a", b"encrypted")

    class Encrypted:
        url = place.url

        def entries(self, below=""):
            return [replace(entry, tag="0" * 32) for entry in place.entries(below)]

        def read(self, name, begin=0, end=None):
            reads.append(name)
            return place.read(name, begin, end)

        def __getattr__(self, name):
            return getattr(place, name)

    download(Encrypted(), str(tmp_path / "back"), note=notes.append)

    assert (tmp_path / "back/a").read_bytes() == b"encrypted"
    assert reads == ["a", "a"]
    assert notes == ["a: the store's ETag is no MD5; two reads were equal"]


def test_a_file_that_was_changed_here_is_fetched_again(place_url, folder, tmp_path):
    upload(str(folder), place_url)
    download(place_url, str(tmp_path / "back"))
    (tmp_path / "back/a.txt").write_bytes(b"b")

    moved = download(place_url, str(tmp_path / "back"))

    assert moved.num_skipped == 2
    assert (tmp_path / "back/a.txt").read_bytes() == b"a"


def test_a_torn_record_costs_only_its_last_line(place_url, folder, tmp_path):
    upload(str(folder), place_url)
    download(place_url, str(tmp_path / "back"))
    record = tmp_path / ".back.muster.jsonl"
    record.write_bytes(record.read_bytes()[:-20])

    assert download(place_url, str(tmp_path / "back")).num_skipped >= 2
    assert download(place_url, str(tmp_path / "back")).num_skipped == 3


def test_two_downloads_into_one_folder_are_refused(place_url, folder, tmp_path):
    upload(str(folder), place_url)
    record = DownloadRecord(str(tmp_path / "back"))
    record.open()
    try:
        with pytest.raises(DataError, match="another download"):
            download(place_url, str(tmp_path / "back"))
    finally:
        record.close()


def test_nothing_to_download_is_an_error_that_says_why(place_url, folder, tmp_path):
    upload(str(folder), place_url)

    with pytest.raises(DataError) as caught:
        download(place_url, str(tmp_path / "back"), regex="nothing")
    assert caught.value.why == "no file's path matches `nothing`"
    with pytest.raises(DataError, match="not a valid regular expression"):
        download(place_url, str(tmp_path / "back"), regex="(")


def test_progress_ends_at_the_whole(place_url, folder, tmp_path):
    seen = []
    upload(str(folder), place_url, progress=seen.append)

    assert (seen[-1].files_done, seen[-1].bytes_done) == (3, seen[-1].total_bytes)
