"""Files in /dev/shm that nothing has open."""

import os
import time

import pytest

from torchmuster.launcher.facts.collect import leftover_shm_files

OLD = time.time() - 3600


@pytest.fixture
def folder(tmp_path):
    """Return an empty folder that stands for /dev/shm."""
    path = tmp_path / "shm"
    path.mkdir()
    return path


def leave(folder, name, size=4096, at=OLD):
    path = folder / name
    path.write_bytes(b"x" * size)
    os.utime(path, (at, at))
    return path


def test_what_nothing_has_open_is_counted_with_its_size(folder):
    leave(folder, "torch_7_1_0", 1 << 20)
    leave(folder, "nccl-Ab12Cd")
    leave(folder, "sem.mp-x")
    leave(folder, "a_file_of_somebody")

    count, size = leftover_shm_files(str(folder))

    assert count == 3
    assert size >= 1 << 20


def test_a_file_that_is_open_or_new_is_left_alone(folder):
    leave(folder, "torch_7_1_0", at=time.time())
    with leave(folder, "nccl-open").open("rb"):
        assert leftover_shm_files(str(folder)) == (0, 0)

    assert leftover_shm_files(str(folder))[0] == 1


def test_a_mapped_file_is_in_use(folder):
    import mmap

    path = leave(folder, "torch_8_1_0")
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    try:
        assert leftover_shm_files(str(folder)) == (0, 0)
    finally:
        mapped.close()


def test_a_folder_that_is_not_there_has_none(tmp_path):
    assert leftover_shm_files(str(tmp_path / "none")) == (0, 0)
