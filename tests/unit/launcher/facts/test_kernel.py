"""What the kernel shows as files: what can't be read is empty."""

from torchmuster.core.node.kernel import list_folder, log_records, read_bytes, read_text


def test_what_is_not_there_is_empty(tmp_path):
    path = str(tmp_path / "absent")
    assert (read_bytes(path), read_text(path), list_folder(path)) == (b"", "", [])
    assert list(log_records(str(tmp_path))) == []


def test_only_the_beginning_of_a_long_file_is_read(tmp_path):
    (tmp_path / "long").write_bytes(b"a" * 100_000)
    assert len(read_bytes(str(tmp_path / "long"))) == 65_536


def test_a_folder_is_listed_in_order(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).touch()
    assert list_folder(str(tmp_path)) == ["a", "b"]
