import os
from dataclasses import replace

import pytest

from torchmuster.workflow.data.faults import DataError
from torchmuster.workflow.data.fetch import DownloadRecord
from torchmuster.workflow.data.remote import open_store
from torchmuster.workflow.data.transfer import download, upload


def test_a_folder_comes_back_as_it_was_sent(store_url, folder, tree, tmp_path):
    upload(str(folder), store_url)
    moved = download(store_url, str(tmp_path / "back"))

    assert tree(tmp_path / "back") == tree(folder)
    assert (moved.num_files, moved.num_skipped) == (3, 0)
    assert download(store_url, str(tmp_path / "back")).num_skipped == 3


def test_local_copies_keep_their_modes_and_share_no_inode(folder, tmp_path):
    download(str(folder), str(tmp_path / "back"))

    ours, theirs = os.stat(tmp_path / "back/deep/run.sh"), os.stat(folder / "deep/run.sh")
    assert ours.st_mode == theirs.st_mode
    assert ours.st_ino != theirs.st_ino


def test_failures_that_may_pass_are_tried_again(store_url, folder, tree, tmp_path, flaky):
    place = open_store(store_url)
    errors = [ConnectionError("reset"), TimeoutError("slow")]
    upload(str(folder), flaky(place, put=errors, entries=[ConnectionError("reset")]))
    download(flaky(place, read=errors, stat=errors, entries=errors), str(tmp_path / "back"))

    assert tree(tmp_path / "back") == tree(folder)


def test_denied_is_said_at_once_and_not_tried_again(store_url, folder, flaky):
    place = flaky(open_store(store_url), put=[PermissionError("no")] * 3)

    with pytest.raises(DataError, match="access was denied") as caught:
        upload(str(folder), place, num_parallel=1)

    assert not caught.value.may_pass
    assert open_store(store_url).entries() == []


def test_a_range_that_comes_short_is_asked_for_again(tmp_path, altered):
    store = open_store("memory://short/x")
    store.write("a", b"0123456789")

    def short(ask, name, begin, end):
        return ask(name, begin, min(begin + 4, end))

    download(altered(store, read=short), str(tmp_path / "back"))

    assert (tmp_path / "back/a").read_bytes() == b"0123456789"


def test_an_etag_that_never_fits_is_believed_only_after_two_equal_reads(tmp_path, altered):
    store, notes, reads = open_store("memory://etag/x"), [], []
    store.write("a", b"encrypted")

    def encrypted(ask, below):
        return [replace(entry, tag="0" * 32) for entry in ask(below)]

    def noted(ask, name, begin, end):
        reads.append(name)
        return ask(name, begin, end)

    odd = altered(store, entries=encrypted, read=noted)
    download(odd, str(tmp_path / "back"), note=notes.append)

    assert (tmp_path / "back/a").read_bytes() == b"encrypted"
    assert reads == ["a", "a"]
    assert notes == ["a: the store's ETag is no MD5; two reads were equal"]


def test_a_file_that_was_changed_here_is_fetched_again(store_url, folder, tmp_path):
    upload(str(folder), store_url)
    download(store_url, str(tmp_path / "back"))
    (tmp_path / "back/a.txt").write_bytes(b"b")

    moved = download(store_url, str(tmp_path / "back"))

    assert moved.num_skipped == 2
    assert (tmp_path / "back/a.txt").read_bytes() == b"a"


def test_a_torn_record_costs_only_its_last_line(store_url, folder, tmp_path):
    upload(str(folder), store_url)
    download(store_url, str(tmp_path / "back"))
    record = tmp_path / ".back.muster.jsonl"
    record.write_bytes(record.read_bytes()[:-20])

    assert download(store_url, str(tmp_path / "back")).num_skipped >= 2
    assert download(store_url, str(tmp_path / "back")).num_skipped == 3


def test_two_downloads_into_one_folder_are_refused(store_url, folder, tmp_path):
    upload(str(folder), store_url)
    record = DownloadRecord(str(tmp_path / "back"))
    record.open()
    try:
        with pytest.raises(DataError, match="another download"):
            download(store_url, str(tmp_path / "back"))
    finally:
        record.close()


def test_nothing_to_download_is_an_error_that_says_why(store_url, folder, tmp_path):
    upload(str(folder), store_url)

    with pytest.raises(DataError) as caught:
        download(store_url, str(tmp_path / "back"), regex="nothing")
    assert caught.value.why == "no file's path matches `nothing`"
    with pytest.raises(DataError, match="not a valid regular expression"):
        download(store_url, str(tmp_path / "back"), regex="(")


def test_progress_ends_at_the_whole(store_url, folder, tmp_path):
    seen = []
    upload(str(folder), store_url, progress=seen.append)

    assert (seen[-1].files_done, seen[-1].bytes_done) == (3, seen[-1].total_bytes)
