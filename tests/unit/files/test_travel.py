"""torchmuster as an archive: named by content, the same everywhere, and nothing of this machine in it."""

import io
import zipfile

from torchmuster.files import travel
from torchmuster.node.remote import loader as remote_loader

FILES = [("a.py", b"1"), ("b/c.py", b"2")]


def test_same_content_gives_the_same_bytes():
    assert travel.make_archive(FILES) == travel.make_archive(FILES)


def test_hash_tells_names_and_contents_apart():
    hashes = {
        travel.content_hash(files)
        for files in (
            FILES,
            [("a.py", b"12"), ("b/c.py", b"")],
            [("a.py1", b""), ("b/c.py", b"2")],
            FILES[:1],
        )
    }
    assert len(hashes) == 4


def test_loader_counts_as_we_do():
    files = travel.package_files(travel.package_folder())
    assert remote_loader.content_hash(files) == travel.content_hash(files)
    assert sorted(remote_loader.tree_files(travel.package_folder())) == files


def test_compiled_files_do_not_change_the_hash(tmp_path):
    (tmp_path / "a.py").write_text("1")
    before = travel.content_hash(travel.package_files(str(tmp_path)))
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"compiled")
    assert travel.content_hash(travel.package_files(str(tmp_path))) == before


def test_archive_is_made_once_and_a_damaged_one_again(tmp_path):
    sha = travel.content_hash(FILES)
    data = travel.travelling_package(str(tmp_path), FILES, sha)
    (kept,) = tmp_path.iterdir()
    assert kept.name == f"torchmuster-{sha}.zip"
    kept.write_bytes(b"damaged")
    assert travel.travelling_package(str(tmp_path), FILES, sha) == data
    assert kept.read_bytes() == data


def test_package_holds_text_only_so_it_is_right_for_every_processor():
    """x86_64 and aarch64 differ in machine code; there is none."""
    files = travel.package_files(travel.package_folder())
    data = travel.make_archive(files)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        for name in names:
            archive.read(name).decode()  # text
    assert {name.rpartition(".")[2] for name in names} <= {"py", "pyi", "typed", "css", "j2", "js"}
    assert "node/remote/main.py" in names
