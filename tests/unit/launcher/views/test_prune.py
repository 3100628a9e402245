"""What `muster prune` removes, and above all what it leaves."""

import fcntl
import json
import os
import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from kit.values import run_plan, run_result
from torchmuster.core import proc
from torchmuster.core.files.atomic import write_json
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.owner.create import write_owner
from torchmuster.errors import RunDirectoryError
from torchmuster.launcher.jobs.answers import JobStatusCache
from torchmuster.launcher.views.prune import is_good_snapshot, measure, plan_prune, remove

DAY_S = 86400.0
NOW = 2_000_000_000.0


@pytest.fixture
def home(home, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))  # where environments lie
    (home / "runs").mkdir(parents=True)
    return home


@pytest.fixture
def make(home):
    """Return a function that makes a run which ended so many days ago, or whose owner is given."""

    def run(name, days=40, *, owner=None, snapshots_of=None):
        run_dir = RunDir(str(home / "runs" / name))
        os.makedirs(run_dir.logs)
        write_json(run_dir.plan, codec.to_plain(run_plan()))
        if owner is None:
            write_json(run_dir.result, codec.to_plain(run_result(run_id=name)))
        elif owner == "lives":
            write_owner(run_dir)
        else:
            write_json(run_dir.owner, owner)
        if snapshots_of is not None:
            os.makedirs(snapshots_of.snapshots)
            os.symlink(snapshots_of.snapshots, run_dir.snapshots)
            age(snapshots_of.path, 40)
        age(run_dir.path, days)
        return run_dir

    return run


def age(path, days):
    """Make a folder and all in it look so old."""
    at = NOW - days * DAY_S
    for folder, _, files in os.walk(path):
        for file in files:
            os.utime(os.path.join(folder, file), (at, at), follow_symlinks=False)
        os.utime(folder, (at, at))


def snapshot(run_dir, step, *, damage=False):
    path = Path(run_dir.snapshots, f"step-{step:09d}")
    path.mkdir(parents=True)
    (path / "data-00000.bin").write_bytes(b"x" * (5000 if damage else 9000))
    body = json.dumps({"files": {"data-00000.bin": [9000, 1]}}).encode()
    head = b"torchmuster-snapshot 1 crc32=%08x bytes=%d\n" % (zlib.crc32(body), len(body))
    (path / "manifest.json").write_bytes(head + body)
    return path


def plan(**given):
    return plan_prune(30 * DAY_S, NOW, **given)


def names(found):
    return [removal.name for removal in found.removals]


def remove_all(found):
    for removal in found.removals:
        remove(removal)


def test_old_runs_go_and_young_ones_stay(make, home):
    make("old")
    make("young", days=20)

    found = plan()
    assert names(found) == ["old"]
    assert found.size_bytes > 0
    remove_all(found)
    assert sorted(os.listdir(home / "runs")) == ["young"]


GONE = {"pid": 2**22 + 1, "start_ticks": 1, "boot_id": proc.boot_id(), "host": "x"}
ELSEWHERE = {"pid": 1, "start_ticks": 1, "boot_id": "other", "host": "elsewhere"}


def test_a_run_stays_unless_its_owner_is_known_to_have_ended(make):
    make("gone", owner=GONE)
    make("here", owner="lives")
    make("there", owner=ELSEWHERE)

    assert names(plan()) == ["gone"]
    assert plan().kept == ("here: it is starting", "there: it is starting")


def test_a_run_whose_job_nobody_knows_stays(make, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("torchmuster.launcher.jobs.jobs._STATUS_CACHE", JobStatusCache())
    run_dir = make("r")
    os.unlink(run_dir.result)
    write_json(run_dir.job, {"engine": "slurm", "job_id": "7"})
    age(run_dir.path, 40)

    assert names(plan()) == []
    assert "it is unknown" in plan().kept[0]


def test_a_folder_that_is_no_run_stays(home):
    (home / "runs/mine").mkdir()
    (home / "runs/mine/thesis.tex").write_text("all of it")
    age(home / "runs/mine", 99)

    assert names(plan()) == []


def test_snapshots_that_another_run_uses_stay(make):
    make("second", days=1, snapshots_of=make("first"))

    for keep in (False, True):
        found = plan(keep_last_snapshot=keep)
        assert names(found) == []
        assert found.kept == ("first: second uses its snapshots or outputs (--linked)",)
    assert names(plan(with_linked=True)) == ["first"]


def test_snapshots_that_a_living_run_uses_stay_even_when_asked(make):
    make("second", days=1, owner="lives", snapshots_of=make("first"))

    assert names(plan(with_linked=True)) == []


def test_a_run_and_the_one_that_uses_it_go_together(make):
    make("second", snapshots_of=make("first"))

    assert sorted(names(plan())) == ["first", "second"]


def test_links_are_removed_and_not_followed(make, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("all of it")
    run_dir = make("r")
    os.symlink(precious, run_dir.snapshots)
    os.symlink(precious / "thesis.tex", os.path.join(run_dir.path, "link"))
    age(run_dir.path, 40)

    remove_all(plan())
    assert not os.path.lexists(run_dir.path)
    assert (precious / "thesis.tex").read_text() == "all of it"


def test_a_run_that_is_itself_a_link_is_left_alone(home, make, tmp_path):
    real = make("r")
    elsewhere = tmp_path / "elsewhere"
    os.rename(real.path, elsewhere)
    os.symlink(elsewhere, real.path)

    assert names(plan()) == []
    assert elsewhere.is_dir()


def test_a_folder_that_becomes_a_link_meanwhile_is_not_entered(make, tmp_path):
    run_dir = make("r")
    for step in (1, 2):
        snapshot(run_dir, step)
    age(run_dir.path, 40)
    (removal,) = plan(keep_last_snapshot=True).removals
    os.rename(run_dir.snapshots, tmp_path / "moved")
    os.symlink(tmp_path / "moved", run_dir.snapshots)

    with pytest.raises(RunDirectoryError, match="reached through a link"):
        remove(removal)
    assert len(os.listdir(tmp_path / "moved")) == 2


def test_a_run_that_lives_again_is_not_removed(make):
    run_dir = make("r")
    (removal,) = plan().removals
    os.unlink(run_dir.result)
    write_owner(run_dir)

    with pytest.raises(RunDirectoryError, match="it is starting"):
        remove(removal)
    assert os.path.isdir(run_dir.path)


def test_the_newest_good_snapshot_and_the_record_are_kept(make):
    run_dir = make("r")
    for step in (100, 200, 300):
        snapshot(run_dir, step, damage=step == 300)
    os.makedirs(os.path.join(run_dir.snapshots, ".step-000000400.3.tmp"))
    os.makedirs(os.path.join(run_dir.snapshots, "bad-step-000000050"))
    age(run_dir.path, 40)

    remove_all(plan(keep_last_snapshot=True))
    assert os.listdir(run_dir.snapshots) == ["step-000000200"]
    assert is_good_snapshot(os.path.join(run_dir.snapshots, "step-000000200"))
    assert os.path.isfile(run_dir.result)
    assert os.path.isdir(run_dir.logs)


def test_where_no_snapshot_is_good_all_stay(make):
    run_dir = make("r")
    snapshot(run_dir, 1, damage=True)
    age(run_dir.path, 40)

    assert names(plan(keep_last_snapshot=True)) == []


@pytest.mark.parametrize(
    "manifest", [b"", b"{}", b"torchmuster-snapshot 1 crc32=00000000 bytes=99\n{}"]
)
def test_a_torn_manifest_makes_no_good_snapshot(make, manifest):
    path = snapshot(make("r"), 1)
    (path / "manifest.json").write_bytes(manifest)
    assert not is_good_snapshot(str(path))


def test_a_removal_that_was_cut_short_is_ended_by_the_next(home):
    (home / "runs/.pruned-r").mkdir()
    remove_all(plan())
    assert os.listdir(home / "runs") == []


def test_zipapps_that_nobody_uses_go(home):
    cache = home / "cache"
    cache.mkdir()
    for name, days in (("old.pyz", 40), ("new.pyz", 1), ("other", 40)):
        (cache / name).write_text("x")
        os.utime(cache / name, (NOW - days * DAY_S,) * 2)
    remove_all(plan())
    assert sorted(os.listdir(cache)) == ["new.pyz", "other"]


def test_what_a_run_takes_is_counted_without_following_links(tmp_path):
    (tmp_path / "big").write_bytes(b"x" * 100_000)
    (tmp_path / "run").mkdir()
    os.symlink(tmp_path / "big", tmp_path / "run/link")
    assert measure(str(tmp_path / "run")) < 50_000


def environments(home, *days):
    folder = home.parent / "tmp" / f"muster-environments-{os.getuid()}"
    folder.mkdir(0o700)
    for number in days:
        one = folder / f"sha{number}"
        one.mkdir()
        (one / "file").write_bytes(bytes(100_000))
        at = time.time() - number * DAY_S
        os.utime(one, (at, at))
    return folder


def pruned(found, name):
    return [os.path.basename(p) for r in found.removals if r.name == name for p in r.paths]


def test_environments_go_by_age_and_by_size_but_not_one_that_is_used(home):
    folder = environments(home, 1, 2, 40, 50)
    assert pruned(plan(), "environments") == ["sha40", "sha50"]
    most = plan_prune(90 * DAY_S, NOW, most_bytes=250_000)
    assert pruned(most, "environments") == ["sha40", "sha50"]
    hold = os.open(folder / "sha50", os.O_RDONLY)
    fcntl.flock(hold, fcntl.LOCK_SH)
    found = plan()
    assert pruned(found, "environments") == ["sha40"]
    (removal,) = [r for r in found.removals if r.name == "environments"]
    assert removal.size_bytes >= 100_000
    remove(removal)
    assert sorted(os.listdir(folder)) == ["sha1", "sha2", "sha50"]
    with pytest.raises(RunDirectoryError, match="a run uses it"):
        remove(replace(removal, paths=(str(folder / "sha50"),)))
    os.close(hold)


def test_archives_of_environments_go_by_age_and_by_size(home):
    (home / "cache").mkdir()
    for number in (1, 40):
        path = home / "cache" / f"environment-sha{number}.parcel"
        path.write_bytes(bytes(100_000))
        os.utime(path, (NOW - number * DAY_S,) * 2)
    assert pruned(plan(), "archives") == ["environment-sha40.parcel"]
    found = plan_prune(90 * DAY_S, NOW, most_bytes=0)
    assert len(pruned(found, "archives")) == 2
    remove_all(found)
    assert os.listdir(home / "cache") == []
