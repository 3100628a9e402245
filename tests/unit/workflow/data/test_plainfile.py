"""A path that others gave is a plain file or an error, at once."""

import os
import socket

import pytest

from torchmuster.core.files.atomic import read_json
from torchmuster.core.plainfile import open_plain
from torchmuster.errors import ManyErrors, UsageError
from torchmuster.launcher.spec.site import _read
from torchmuster.launcher.spec.site_files import read_hostfile
from torchmuster.workflow.data.faults import DataError
from torchmuster.workflow.data.remote import open_store
from torchmuster.workflow.spec.load import read_source


def test_a_file_and_a_link_to_one_are_opened(tmp_path):
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with open_plain(str(tmp_path / name)) as file:
            assert file.read() == b"text"


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path)


@pytest.mark.parametrize(
    "make", [os.mkfifo, make_socket, lambda path: os.symlink("/dev/zero", path)]
)
def test_what_is_no_plain_file_is_an_error_and_never_waited_for(tmp_path, make):
    path = str(tmp_path / "thing")
    make(path)
    with pytest.raises(OSError, match="it is a pipe, a socket or a device, not a file"):
        open_plain(path)


def test_a_directory_is_told_as_one(tmp_path):
    with pytest.raises(IsADirectoryError):
        open_plain(str(tmp_path))


def test_a_descriptor_of_the_shell_is_read_where_a_command_line_may_have_one():
    reading, writing = os.pipe()
    os.write(writing, b"n1\n")
    os.close(writing)
    with open_plain(f"/dev/fd/{reading}", or_descriptor=True) as file:
        assert file.read() == b"n1\n"
    os.close(reading)


def test_no_file_of_ours_is_read_from_a_pipe(tmp_path):
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    errors = []
    assert _read(path, {}, [], errors) is None
    assert "not a file" in errors[0].why
    with pytest.raises(ManyErrors, match="hostfile can't be read"):
        read_hostfile(path)
    with pytest.raises(UsageError, match="workflow file can't be read"):
        read_source(path)
    assert read_json(path) is None
    with pytest.raises(DataError) as caught:
        open_store(str(tmp_path)).read("pipe")
    assert "not a file" in caught.value.why
    with pytest.raises(OSError, match="not a file"):
        open_store(str(tmp_path)).bare().read("pipe")
