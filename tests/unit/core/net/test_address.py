import os
import stat

import pytest

from kit.work import do_together
from torchmuster.core.net import address as addresses
from torchmuster.errors import RunDirectoryError, UsageError


@pytest.mark.parametrize(
    ("address", "name"),
    [("127.0.0.1", "lo"), ("127.0.1.1", "lo"), ("192.0.2.1", None), ("2001:db8::1", None)],
)
def test_only_an_address_of_this_machine_has_an_interface_here(address, name):
    assert addresses.interface_of(address) == name


# The secret.


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "secret")


def write(path, content, mode=0o600):
    with open(path, "wb") as file:
        file.write(content)
    os.chmod(path, mode)


def test_a_secret_is_read_as_it_was_written(path):
    secret = addresses.new_secret()
    addresses.write_secret(path, secret)

    assert addresses.read_secret(path) == secret
    assert len(secret) == addresses.SECRET_BYTES


def test_two_secrets_differ():
    assert addresses.new_secret() != addresses.new_secret()


def test_the_file_is_for_its_owner_alone(path):
    umask = os.umask(0)
    try:
        addresses.write_secret(path, addresses.new_secret())
    finally:
        os.umask(umask)

    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_a_secret_is_never_written_over_another(path):
    first = addresses.new_secret()
    addresses.write_secret(path, first)

    with pytest.raises(FileExistsError):
        addresses.write_secret(path, addresses.new_secret())
    assert addresses.read_secret(path) == first
    assert os.listdir(os.path.dirname(path)) == ["secret"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666, 0o610])
def test_a_file_that_others_can_open_is_refused_with_its_mode(path, mode):
    write(path, b"ab" * 32, mode)

    with pytest.raises(UsageError, match="can be read by others") as caught:
        addresses.read_secret(path)
    assert f"{mode:04o}" in caught.value.why
    assert caught.value.fix == f"chmod 600 {path}"


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_for_its_owner_alone_is_taken(path, mode):
    write(path, b"ab" * 32 + b"\n", mode)

    assert addresses.read_secret(path) == b"\xab" * 32


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"ab" * 15, b"xyz", b"ab" * 32 + b"g", b"ab cd" * 3, bytes(range(256))],
)
def test_a_short_or_malformed_secret_is_refused(path, content):
    write(path, content)

    with pytest.raises(UsageError, match="not at least 16 bytes in hexadecimal digits"):
        addresses.read_secret(path)


def test_a_missing_secret_is_an_error_with_the_reason(path):
    with pytest.raises(RunDirectoryError) as caught:
        addresses.read_secret(path)

    assert (caught.value.where, caught.value.why) == (path, "No such file or directory")


def test_whoever_finds_the_file_finds_a_whole_secret_in_it(path):
    """Nodes of one job may make `$MUSTER_HOME/key` at the same moment."""
    found = []

    def make_or_read(_):
        try:
            addresses.write_secret(path, addresses.new_secret())
        except FileExistsError:
            found.append(addresses.read_secret(path))

    do_together(8, make_or_read)

    assert found == [addresses.read_secret(path)] * 7
