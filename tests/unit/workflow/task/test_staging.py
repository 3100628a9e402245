"""Filling a scratch folder: links, copies, archives, and what is not done twice."""

import os
import tarfile
import zipfile

import pytest

from torchmuster.core.model.plan import Stage
from torchmuster.core.node.setup import refusal_of
from torchmuster.launcher.node.shell import SetupError
from torchmuster.workflow.task import staging
from torchmuster.workflow.task.staging import StagingError, stage_all
from unit.launcher.node.test_shell import node  # noqa: F401 - a fixture


def quiet(source, done, total):
    """Take progress and drop it."""


@pytest.fixture
def scratch(tmp_path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (folder / "sub" / "b.txt").write_text("b")
    (folder / "link").symlink_to("a.txt")
    return folder


def run(scratch, *pairs, tell=quiet):
    stages = [Stage(source=str(source), target=target) for source, target in pairs]
    stage_all(str(scratch), stages, tell)


def tar_of(path, source, mode="w", name="data"):
    with tarfile.open(path, mode) as archive:
        archive.add(source, arcname=name)
    return path


@pytest.fixture
def archive(data, tmp_path):
    return tar_of(tmp_path / "d.tar", data)


def test_a_folder_on_the_same_file_system_is_linked(scratch, data):
    run(scratch, (data, "x/data"))

    assert os.readlink(scratch / "x" / "data") == str(data)


def test_what_lies_on_another_file_system_is_copied(scratch, data, tmp_path):
    progress = staging.StageProgress(str(data), quiet)
    staging._copy(str(scratch), str(data), str(scratch / "data"), progress)

    assert (scratch / "data" / "sub" / "b.txt").read_text() == "b"
    assert os.readlink(scratch / "data" / "link") == "a.txt"
    assert not (scratch / "data").is_symlink()
    assert progress.done_bytes == progress.total_bytes == 2


@pytest.mark.parametrize(
    ("suffix", "mode"),
    [("tar", "w"), ("tar.gz", "w:gz"), ("tgz", "w:gz"), ("tar.bz2", "w:bz2"), ("tar.xz", "w:xz")],
)
def test_archives_are_unpacked_by_their_suffix(scratch, data, tmp_path, suffix, mode):
    said = []
    archive = tar_of(tmp_path / f"d.{suffix}", data, mode)
    run(scratch, (archive, "."), tell=lambda *words: said.append(words))

    assert (scratch / "data" / "sub" / "b.txt").read_text() == "b"
    assert said, "an archive has progress"


def test_a_zip_is_unpacked_with_its_execute_bits(scratch, tmp_path):
    with zipfile.ZipFile(tmp_path / "d.zip", "w") as archive:
        info = zipfile.ZipInfo("bin/tool")
        info.external_attr = 0o755 << 16
        archive.writestr(info, "#!/bin/sh\n")
    run(scratch, (tmp_path / "d.zip", "in"))

    assert os.access(scratch / "in" / "bin" / "tool", os.X_OK)


def test_two_archives_unpack_into_one_folder(scratch, data, tmp_path):
    one = tar_of(tmp_path / "one.tar", data / "sub")
    other = tar_of(tmp_path / "other.tar", data / "a.txt", name="data/a.txt")
    run(scratch, (one, "."), (other, "."))

    assert sorted(os.listdir(scratch / "data")) == ["a.txt", "b.txt"]


def test_a_tar_that_leads_outside_is_refused(scratch, tmp_path):
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("../out.txt"))
    with pytest.raises(StagingError, match="can't be unpacked"):
        run(scratch, (tmp_path / "bad.tar", "."))
    assert not (tmp_path / "out.txt").exists()


def test_a_zip_that_leads_outside_is_refused(scratch, tmp_path):
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr("../out.txt", "x")
    with pytest.raises(StagingError, match="can't be unpacked") as caught:
        run(scratch, (tmp_path / "bad.zip", "."))
    assert "outside" in caught.value.why
    assert not (tmp_path / "out.txt").exists()


def test_a_broken_archive_is_named(scratch, tmp_path):
    (tmp_path / "bad.tar.gz").write_bytes(b"no archive")
    with pytest.raises(StagingError, match=r"bad\.tar\.gz` can't be unpacked"):
        run(scratch, (tmp_path / "bad.tar.gz", "."))


def test_a_missing_source_is_named(scratch, tmp_path):
    with pytest.raises(StagingError, match="does not exist"):
        run(scratch, (tmp_path / "nope", "x"))


def test_what_is_whole_is_not_done_again(scratch, archive):
    run(scratch, (archive, "."))
    (scratch / "data" / "a.txt").write_text("changed by the run")
    run(scratch, (archive, "."))

    assert (scratch / "data" / "a.txt").read_text() == "changed by the run"


def test_a_changed_source_is_staged_again(scratch, data, archive):
    run(scratch, (archive, "."))
    (data / "a.txt").write_text("new")
    os.unlink(archive)
    tar_of(archive, data)
    run(scratch, (archive, "."))

    assert (scratch / "data" / "a.txt").read_text() == "new"


def test_a_half_copy_is_redone(scratch, archive):
    half = scratch / staging.OWN_FOLDER / "half-0" / "data"
    half.mkdir(parents=True)
    (half / "rest").write_text("of a killed agent")
    run(scratch, (archive, "."))

    assert sorted(os.listdir(scratch / "data")) == ["a.txt", "link", "sub"]
    assert not (scratch / staging.OWN_FOLDER / "half-0").exists()


def test_nothing_is_written_through_a_link(scratch, data, archive):
    with pytest.raises(StagingError, match="behind a link"):
        run(scratch, (data, "data"), (archive, "data/more"))
    assert sorted(os.listdir(data)) == ["a.txt", "link", "sub"]


def test_too_little_room_is_said_with_numbers(scratch, tmp_path):
    disk = os.statvfs(scratch)
    huge = tmp_path / "huge"
    with open(huge, "wb") as file:
        file.truncate(min(disk.f_bavail * disk.f_frsize + (1 << 30), 1 << 42))
    progress = staging.StageProgress("x", quiet)
    with pytest.raises(StagingError, match="not enough space") as caught:
        staging._copy(str(scratch), str(huge), str(scratch / "x"), progress)
    assert "it needs" in caught.value.why
    assert "are free there" in caught.value.why


def member(name, kind=tarfile.REGTYPE, link="", mode=0o644):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (member("../out"), "outside"),
        (member("a/../../out"), "outside"),
        (member("dev", tarfile.CHRTYPE), "special file"),
        (member("pipe", tarfile.FIFOTYPE), "special file"),
        (member("link", tarfile.SYMTYPE, "/etc/passwd"), "absolute path"),
        (member("link", tarfile.SYMTYPE, "../out"), "outside"),
        (member("link", tarfile.LNKTYPE, "../out"), "outside"),
        (member("inside/file"), "outside"),  # behind a link that is there
    ],
)
def test_without_tarfile_s_own_filter_members_that_lead_outside_are_refused(tmp_path, bad, words):
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "inside").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=words):
        staging._checked(bad, str(tmp_path / "to"))


def test_without_tarfile_s_own_filter_members_are_ours_and_not_privileged(tmp_path):
    script = staging._checked(member("/bin/run", mode=0o6777), str(tmp_path))
    assert (script.name, script.mode, script.uid) == ("bin/run", 0o755, os.getuid())
    assert staging._checked(member("a", mode=0o666), str(tmp_path)).mode == 0o644
    link = staging._checked(member("d/link", tarfile.SYMTYPE, "../a"), str(tmp_path))
    assert link.linkname == "../a"


def test_what_is_staged_is_there_before_the_commands(node, tmp_path):  # noqa: F811
    (tmp_path / "data").mkdir()
    stages = (Stage(source=str(tmp_path / "data"), target="in/data"),)
    node(stages=stages, before=('ls "$MUSTER_SCRATCH"/in > seen',))

    assert (tmp_path / "seen").read_text() == "data\n"


def test_a_missing_source_is_named_with_the_node(node, tmp_path):  # noqa: F811
    with pytest.raises(SetupError, match="staging failed on n2") as caught:
        node(stages=(Stage(source=str(tmp_path / "nope"), target="x"),))

    assert str(tmp_path / "nope") in caught.value.where
    assert refusal_of(caught.value)["hint"] == caught.value.fix
