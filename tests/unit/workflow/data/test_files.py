import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.workflow.data.faults import DataError
from torchmuster.workflow.data.files import check_names, local_files, target_path, unsafe_reason


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/etc/passwd", "a//b", "a/", "", "a\0b", "./a"]
)
def test_names_that_could_write_elsewhere_are_unsafe(name):
    assert unsafe_reason(name)


@given(st.lists(st.sampled_from(["..", ".", "a", "b c", "", "..."]), min_size=1).map("/".join))
def test_a_name_that_is_safe_stays_in_the_folder(name):
    if unsafe_reason(name) is None:
        path = os.path.normpath(os.path.join("/folder", name))
        assert path == "/folder/" + name


@pytest.mark.parametrize(
    ("names", "said"),
    [(["ok", "../one", "/two"], ["`../one`", "`/two`"]), (["a", "a/b"], ["`a` is a file"])],
    ids=["names that lead out, all at once", "a file that others need as a folder"],
)
def test_names_that_can_t_be_written_are_refused(names, said):
    with pytest.raises(DataError) as caught:
        check_names(names, "s3://b")

    assert [word in caught.value.why for word in said] == [True] * len(said)


def test_a_symlink_in_the_target_that_leads_out_is_refused(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/link").symlink_to(tmp_path / "outside")

    with pytest.raises(DataError, match="outside the folder"):
        target_path(str(tmp_path / "folder"), "link/x")


def test_symlinks_inside_are_followed_and_those_that_leave_are_named(folder, tmp_path):
    (folder / "link").symlink_to(folder / "a.txt")
    (folder / "loop").symlink_to(folder)
    files, notes = local_files(str(folder))

    assert "link" in [file.name for file in files]
    assert notes == ["`loop` links to a folder above it: skipped"]

    (folder / "secret").symlink_to("/etc/hostname")
    (folder / "etc").symlink_to("/etc")
    with pytest.raises(DataError) as caught:
        local_files(str(folder))
    assert "`etc`, `secret`" in caught.value.what
    assert local_files(str(folder), regex="a.txt")[0][0].name == "a.txt"


def test_pipes_are_left_out_with_a_sentence(folder):
    os.mkfifo(folder / "pipe")

    files, notes = local_files(str(folder))

    assert notes == ["`pipe` is not a regular file: skipped"]
    assert "pipe" not in [file.name for file in files]
