"""The user's quota, said after a job was queued."""

import pytest

from torchmuster.core import proc
from torchmuster.launcher.cli.jobs import parse_quota, quota_warnings

QUOTA = """\
Disk quotas for user me (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
/dev/sda1  4194304* 4194304 5242880   6days  9500   10000   11000
nfs:/home  100 0 0 0 10 0 0 0
"""
LUSTRE = "/scratch 104857600 0 105000000 - 200 0 1000 -\n"


def test_quotas_are_read():
    assert parse_quota(QUOTA) == [("/dev/sda1", 0, "KiB"), ("/dev/sda1", 500, "files")]
    assert parse_quota(LUSTRE) == [("/scratch", 142400, "KiB"), ("/scratch", 800, "files")]


@pytest.mark.parametrize(
    "text", ["", "none\n", "Disk quotas for user me (uid 1): none\n", "/x a b"]
)
def test_no_quota_is_none(text):
    assert parse_quota(text) == []


@pytest.fixture
def tools(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "quota").write_text("")
    (tmp_path / "quota").chmod(0o755)


def test_a_quota_that_is_nearly_used_up_is_said(tools, tmp_path):
    def asking(argv):
        return proc.CommandOutput(status=1, stdout=QUOTA.encode(), stderr=b"")

    assert quota_warnings(str(tmp_path), asking) == [
        "your quota on /dev/sda1 leaves 0 MiB (`quota -w`)",
        "your quota on /dev/sda1 leaves 500 files",
    ]


def test_a_tool_that_hangs_is_left(tools, tmp_path):
    def asking(argv):
        return proc.CommandOutput(status=None, stdout=b"", stderr=b"")

    assert quota_warnings(str(tmp_path), asking) == []


def test_without_tools_nothing_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    def asking(argv):
        raise AssertionError(argv)

    assert quota_warnings(str(tmp_path), asking) == []
