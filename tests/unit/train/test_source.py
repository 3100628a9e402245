import pytest

from torchmuster.train.replay import SnapshotsBefore
from torchmuster.train.snapshot.load import look
from torchmuster.train.snapshot.state import SnapshotError


@pytest.fixture
def folder(tmp_path):
    for step in (3, 6, 9):
        (tmp_path / f"step-{step:09d}").mkdir()
    return tmp_path


def test_only_what_is_older_than_the_step_is_seen(folder):
    assert SnapshotsBefore(str(folder), 9).steps() == [6, 3]
    assert SnapshotsBefore(str(folder), 7).steps() == [6, 3]
    assert SnapshotsBefore(str(folder), 3).steps() == []


def test_the_folder_stays_as_it_is(folder):
    source, before = SnapshotsBefore(str(folder), 7), sorted(folder.rglob("*"))
    found = look(source, report=lambda text: None)
    assert found.loaded is None
    assert [step for step, _ in found.damaged] == [6, 3]
    for change in (
        lambda: source.set_aside(6),
        lambda: source.delete(6),
        lambda: source.tidy(1),
        lambda: source.begin(7, 1),
        source.claim_generation,
    ):
        with pytest.raises(SnapshotError, match="a replay was about to change the snapshots"):
            change()
    assert sorted(folder.rglob("*")) == before
