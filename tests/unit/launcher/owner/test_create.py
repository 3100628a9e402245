import os
import stat

import pytest

from kit.values import run_plan
from torchmuster.core.net.address import read_secret
from torchmuster.core.owner.create import check_run_id, create_run_dir, new_run_id
from torchmuster.core.owner.record import read_plan
from torchmuster.errors import RunDirectoryError, UsageError
from torchmuster.launcher.views.find import owner_lives

PLAN = run_plan(run_id="mine")


pytestmark = pytest.mark.usefixtures("home")


def test_a_run_directory_has_plan_secret_owner_and_folders_for_logs_and_others_cant_enter(home):
    run_dir = create_run_dir(PLAN)

    assert read_plan(run_dir) == PLAN
    assert len(read_secret(run_dir.secret)) == 32
    assert owner_lives(run_dir)
    assert os.path.isdir(run_dir.logs)
    for folder in (run_dir.path, home / "runs"):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


def test_a_run_directory_is_never_used_twice():
    create_run_dir(PLAN)

    with pytest.raises(UsageError, match="exists already"):
        create_run_dir(PLAN)


def test_a_file_in_the_place_of_the_runs_is_not_taken_for_a_run_that_exists(home):
    home.mkdir()
    (home / "runs").write_text("")

    with pytest.raises(RunDirectoryError, match="can't be written"):
        create_run_dir(PLAN)


@pytest.mark.parametrize("name", ["a", "20260101-x_y.z", "9", "A" * 128])
def test_a_name_that_a_folder_can_have_is_taken(name):
    check_run_id(name)


@pytest.mark.parametrize("name", ["", ".", "..", "-a", ".a", "a/b", "a b", "ä", "a\n", "A" * 129])
def test_another_name_is_refused(name):
    with pytest.raises(UsageError):
        check_run_id(name)


@pytest.mark.parametrize("target", ["train.py", "a/b c.py", "pkg.train", "ü.py", "-.py", "x" * 300])
def test_the_name_of_any_script_makes_a_name_of_a_run(target):
    check_run_id(new_run_id(target))


def test_two_runs_of_one_script_have_different_names():
    assert new_run_id("train.py") != new_run_id("train.py")
