"""Lists of hosts in the ways that people have them."""

import pytest

from torchmuster.errors import ManyErrors, UsageError
from torchmuster.launcher.spec.site_files import parse_host, parse_hostfile, read_hostfile


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("node1", ("node1", None, None)),
        ("node1 slots=4", ("node1", 4, None)),
        ("node1 slots=4 max_slots=8", ("node1", 4, None)),
        ("node1 cpu=2", ("node1", 2, None)),
        ("node1:4", ("node1", 4, None)),
        ("me@10.0.0.1 slots=2", ("10.0.0.1", 2, "me")),
        ("[fe80::1%eth0]:2", ("fe80::1%eth0", 2, None)),
    ],
)
def test_a_line_of_each_kind(line, expected):
    host = parse_host(line)
    assert (host.name, host.slots, host.user) == expected


@pytest.mark.parametrize(
    "line", ["-oProxyCommand=x", "a b", "a slots=0", "a slots=x", "a:2 slots=2", "a;b", "me@", ""]
)
def test_what_is_no_host(line):
    with pytest.raises(UsageError):
        parse_host(line)


def test_a_file_names_each_bad_line():
    with pytest.raises(ManyErrors) as caught:
        parse_hostfile("a\n-b\n# c\n\nd slot=3\n", "hosts")
    assert [error.where for error in caught.value.errors] == ["hosts:2", "hosts:5"]
    assert caught.value.errors[1].fix == "did you mean `slots`?"


def test_a_repeated_host_adds_its_slots():
    hosts = parse_hostfile("a\nb slots=2 # fast\na\n", "hosts")
    assert [(host.name, host.slots) for host in hosts] == [("a", 2), ("b", 2)]


def test_an_empty_file_is_an_error(tmp_path):
    (tmp_path / "hosts").write_text("# nothing\n")
    with pytest.raises(ManyErrors, match="names no host"):
        read_hostfile(str(tmp_path / "hosts"))


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ManyErrors, match="can't be read"):
        read_hostfile(str(tmp_path / "hosts"))
