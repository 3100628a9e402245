import functools
import json
import threading

import pytest

from torchmuster.errors import UsageError
from torchmuster.workflow.data.dataset import DatasetStore
from torchmuster.workflow.data.faults import DataError
from torchmuster.workflow.data.remote import open_store


@pytest.fixture
def store(store_url):
    return DatasetStore(store_url)


def test_every_upload_is_a_new_version_and_the_newest_is_latest(store, folder, tree, tmp_path):
    assert store.upload("d", str(folder)) == 1
    (folder / "a.txt").write_bytes(b"changed")
    assert store.upload("d", str(folder)) == 2

    store.download("d:1", str(tmp_path / "one"))
    store.download("d:latest", str(tmp_path / "two"))
    assert (tmp_path / "one/a.txt").read_bytes() == b"a"
    assert tree(tmp_path / "two") == tree(folder)
    assert (tmp_path / "two/deep/run.sh").stat().st_mode & 0o777 == 0o755


def test_tags_metadata_and_labels_come_back(store, folder):
    about = {"metadata": {"k": [1]}, "labels": {"owner": "me"}, "run_id": "r-1"}
    store.upload("team/d:best", str(folder), **about)
    store.upload("team/d", str(folder))

    found = store.info("team/d:best")
    assert (found.version, found.metadata, found.run_id) == (1, {"k": [1]}, "r-1")
    assert store.labels("team/d") == {"owner": "me"}
    assert (store.tags_of("team/d:1"), store.tags_of("team/d")) == (["best"], ["latest"])


def test_an_update_adds_and_removes_and_keeps_the_rest(store, folder, tmp_path):
    store.upload("d", str(folder))
    (tmp_path / "new.txt").write_bytes(b"new")

    store.update("d", add=[(str(tmp_path / "new.txt"), "more")], remove="deep/")

    assert list(store.info("d").files) == ["a.txt", "empty", "more/new.txt"]


def test_an_upload_that_keeps_adds_to_the_newest_version(store, folder):
    assert store.upload("d", str(folder), paths=["deep"], keep=True) == 1
    assert store.upload("d", str(folder), regex=".*txt", keep=True) == 2

    assert list(store.info("d").files) == ["a.txt", "deep/run.sh"]


def test_an_upload_that_keeps_starts_from_its_tag_or_for_a_new_one_from_the_newest(store, folder):
    store.upload("d:first", str(folder), paths=["deep"])
    store.upload("d", str(folder), regex=".*txt")

    assert store.upload("d:new", str(folder), paths=["empty"], keep=True) == 3
    assert store.upload("d:first", str(folder), paths=["empty"], keep=True) == 4

    assert list(store.info("d:new").files) == ["a.txt", "empty"]
    assert list(store.info("d:4").files) == ["deep/run.sh", "empty"]


def test_only_the_paths_and_names_asked_for_are_taken(store, folder):
    store.upload("d", str(folder), paths=["deep"])
    store.upload("d", str(folder), regex=".*txt")

    assert list(store.info("d:1").files) == ["deep/run.sh"]
    assert list(store.info("d:2").files) == ["a.txt"]


@pytest.mark.parametrize("kind", ["create", "put"])
def test_an_upload_that_fails_leaves_no_version_and_gc_what_it_sent(store_url, folder, flaky, kind):
    place = open_store(store_url)
    store = DatasetStore(flaky(place, **{kind: [PermissionError("no")] * 9}))

    with pytest.raises(DataError, match="denied"):
        store.upload("d", str(folder))

    clean = DatasetStore(store_url)
    assert clean.list() == []
    assert place.entries("uploads") == []
    number, _ = clean.gc(older_than_s=-60)
    assert (number == 3) is (kind == "create")
    assert place.entries("objects") == []


def test_gc_keeps_what_a_version_or_an_upload_under_way_needs(store, store_url, folder):
    store.upload("d", str(folder))
    place = open_store(store_url)
    place.write("objects/ff/" + "f" * 64, b"under way")
    place.write("objects/ee/" + "e" * 64, b"nobody's")
    place.write("uploads/1.json", json.dumps(["f" * 64]).encode())

    assert store.gc(older_than_s=3600.0) == (0, 0)
    assert store.gc(older_than_s=-60) == (1, len(b"nobody's"))
    assert store.verify("d") == []
    assert place.stat("objects/ff/" + "f" * 64) is not None


def numbers_of_uploads_at_once(folder, *stores):
    numbers = []

    def upload(store):
        numbers.append(store.upload("d", str(folder)))

    threads = [threading.Thread(target=upload, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return sorted(numbers)


def test_writers_at_once_each_get_a_version_of_their_own(tmp_path, folder):
    store_url = str(tmp_path / "sets")  # in memory, `create` is no atomic operation
    stores = [DatasetStore(store_url) for _ in range(5)]

    assert numbers_of_uploads_at_once(folder, *stores) == [1, 2, 3, 4, 5]


def test_a_store_without_exclusive_files_gives_numbers_by_claims(tmp_path, folder, altered):
    weak = altered(open_store(str(tmp_path / "weak")), create=lambda ask, name, data: None)
    stores = [DatasetStore(weak) for _ in range(4)]

    assert numbers_of_uploads_at_once(folder, *stores) == [1, 2, 3, 4]
    assert weak.entries("claims") == []


def test_a_number_never_comes_back(store, folder):
    store.upload("d", str(folder))
    store.upload("d:good", str(folder))

    assert store.delete("d:good") == [2]
    assert store.info("d").version == 1
    assert store.list()[0].tags == ()
    assert store.upload("d", str(folder)) == 3


def test_several_versions_are_not_deleted_by_accident(store, folder):
    store.upload("d", str(folder))
    store.upload("d", str(folder))

    with pytest.raises(UsageError, match="2 versions"):
        store.delete("d")
    assert store.delete("d", all_versions=True) == [1, 2]
    assert store.list() == []


def test_damage_is_named_by_verify(store, store_url, folder):
    store.upload("d", str(folder))
    by_path = {path: file.sha256 for path, file in store.info("d").files.items()}
    place = open_store(store_url)
    place.write(f"objects/{by_path['a.txt'][:2]}/{by_path['a.txt']}", b"X")
    place.delete(f"objects/{by_path['empty'][:2]}/{by_path['empty']}")

    found = store.verify("d")
    assert found == ["`a.txt`: its object is damaged", "`empty`: its object is missing"]


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"format": "other"}', b'{"format": 1', b"\xff"])
def test_a_damaged_manifest_is_a_sentence(store, store_url, folder, damage):
    store.upload("d", str(folder))
    open_store(store_url).write("sets/d/versions/1.json", damage)

    with pytest.raises(DataError, match="damaged") as caught:
        store.info("d")
    assert "sets/d/versions/1.json" in caught.value.where


def test_a_manifest_that_was_edited_is_refused(store, store_url, folder):
    store.upload("d", str(folder))
    place = open_store(store_url)
    edited = place.read("sets/d/versions/1.json").replace(b'"a.txt"', b'"b.txt"')
    place.write("sets/d/versions/1.json", edited)

    with pytest.raises(DataError, match="damaged") as caught:
        store.info("d")
    assert "checksum" in caught.value.why


@pytest.mark.parametrize("claimed", [0, 9])
def test_a_size_that_a_manifest_has_wrong_is_damage(store, store_url, folder, tmp_path, claimed):
    store.upload("d", str(folder))
    place = open_store(store_url)
    size, wrong = b'"size_bytes": 10', b'"size_bytes": %d' % claimed
    text = place.read("sets/d/versions/1.json").replace(size, wrong)
    place.write("sets/d/versions/1.json", text)

    with pytest.raises(DataError):
        store.download("d", str(tmp_path / "copy"))
    assert not (tmp_path / "copy/deep/run.sh").exists()


def test_what_is_not_there_is_answered_with_the_nearest(store, folder):
    store.upload("mnist", str(folder), tags=["best"])

    for reference, meant in (("mnits", "mnist"), ("mnist:bset", "best")):
        with pytest.raises(DataError) as caught:
            store.info(reference)
        assert caught.value.fix == f"did you mean `{meant}`?"
    with pytest.raises(DataError, match="no version `7`"):
        store.info("mnist:7")


def test_equal_files_have_an_equal_checksum_and_others_not(store, folder):
    store.upload("d", str(folder))
    store.upload("d", str(folder), metadata={"other": 1})
    (folder / "deep/run.sh").chmod(0o644)
    store.upload("d", str(folder))

    assert store.info("d:1").checksum == store.info("d:2").checksum != store.info("d:3").checksum


def test_many_datasets_are_listed_with_one_request(store_url, altered):
    place = open_store(store_url)
    for number in range(100):
        place.write(f"sets/d{number}/versions/1.json", b"{}")
    asked = []

    def note(kind, ask, *words):
        asked.append(kind)
        return ask(*words)

    requests = {kind: functools.partial(note, kind) for kind in ("check", "entries", "read")}
    counted = altered(open_store(store_url), **requests)

    assert len(DatasetStore(counted).list()) == 100
    assert asked == ["entries"]
