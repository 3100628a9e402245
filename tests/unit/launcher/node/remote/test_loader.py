"""The first program on a host: where it puts torchmuster, and what it trusts."""

import pytest

from torchmuster.launcher.node.remote import loader as remote_loader

FILES = [("__init__.py", b""), ("launcher/node/remote/main.py", b"print(1)")]
SHA = remote_loader.content_hash(FILES)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "torchmuster"


def test_package_lands_in_the_cache_by_its_content(cache):
    root, temporary = remote_loader.unpack(FILES, SHA)
    assert root == str(cache / SHA)
    assert not temporary
    assert remote_loader.has_content(root, SHA)
    assert [path.name for path in cache.iterdir()] == [SHA]


def test_second_session_uses_what_the_first_has_unpacked(cache):
    first = remote_loader.unpack(FILES, SHA)
    assert remote_loader.unpack(FILES, SHA) == first
    assert [path.name for path in cache.iterdir()] == [SHA]


def test_damaged_package_in_the_cache_is_not_used(cache):
    root, _ = remote_loader.unpack(FILES, SHA)
    (cache / SHA / "torchmuster" / FILES[1][0]).write_text("print(2)")
    assert not remote_loader.has_content(root, SHA)
    fresh, temporary = remote_loader.unpack(FILES, SHA)
    assert fresh != root
    assert temporary
    assert remote_loader.has_content(fresh, SHA)


def test_package_lands_in_a_temporary_folder_where_home_takes_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(remote_loader.tempfile, "tempdir", str(tmp_path))
    root, temporary = remote_loader.unpack(FILES, SHA)
    assert temporary
    assert root.startswith(str(tmp_path / "torchmuster-"))


def test_package_that_everybody_can_write_to_is_not_used(cache):
    root, _ = remote_loader.unpack(FILES, SHA)
    (cache / SHA / "torchmuster").chmod(0o777)
    assert not remote_loader.has_content(root, SHA)


@pytest.mark.parametrize(("visible", "number"), [("", 0), ("-1", 0), ("0,1", 2), ("GPU-x", 1)])
def test_gpus_are_those_that_are_visible(monkeypatch, visible, number):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert remote_loader.num_gpus() == number
