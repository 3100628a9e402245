"""What the kernel shows as files: what can't be read is empty; and which GPUs a process sees."""

import pytest

from torchmuster.core.node.kernel import (
    list_folder,
    log_records,
    read_bytes,
    read_text,
    visible_gpus,
)


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


@pytest.mark.parametrize(
    ("chosen", "ids"),
    [
        ("", []),
        ("0", ["0"]),
        ("2, 0 ,1", ["2", "0", "1"]),
        ("GPU-8f2a,MIG-1", ["GPU-8f2a", "MIG-1"]),
        ("0,-1,1", ["0"]),  # an id that is not valid hides all that follow
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_the_variable_names_the_gpus_in_its_order(monkeypatch, chosen, ids):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)

    assert visible_gpus() == ids


def test_without_the_variable_gpus_are_numbered_from_0(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = visible_gpus()

    assert found == [str(index) for index in range(len(found))]


def test_gpus_of_other_files_and_another_environment_are_counted_there(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert visible_gpus({}, str(tmp_path)) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,none,0"}, str(tmp_path)) == ["1"]
