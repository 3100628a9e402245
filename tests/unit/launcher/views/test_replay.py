import os

import pytest

from kit.records import end_of_rank, event, lines
from torchmuster.core.files.layout import RunDir
from torchmuster.errors import NotFoundError, UsageError
from torchmuster.launcher.views.find import view_run
from torchmuster.launcher.views.replay import changed_code, find_step

RUN_ID = "20260101-000000-train-ab12"


@pytest.fixture
def run_dir(home):
    made = RunDir(str(home / "runs" / RUN_ID))
    for step in (0, 20, 40):
        os.makedirs(os.path.join(made.snapshots, f"step-{step:09d}"))
    return made


def write(path, *events):
    lines(path, events)
    with open(path, "a") as file:
        file.write("\x00 torn")


def resumed(run_dir, step, world_size, second, folder=None):
    told = {"step": step, "world_size": world_size, "folder": folder or run_dir.snapshots}
    return event(second, "resumed", **told)


def started(attempt, nodes, second):
    size = sum(len(ranks) for ranks in nodes)
    told = [{"node": f"n{i}", "ranks": f"{r[0]}-{r[-1]}"} for i, r in enumerate(nodes)]
    return event(second, "attempt_started", attempt=attempt, world_size=size, nodes=told)


def failed(attempt, step, rank, second=20):
    error = {"type_name": "ValueError", "message": "m", "where": None, "traceback": ""}
    cause = end_of_rank(rank, attempt, step=step, error=error)
    return event(second, "attempt_failed", attempt=attempt, cause=cause)


@pytest.fixture
def two_attempts(run_dir):
    """Four ranks came to step 48, then three went on from step 40 and failed in step 45."""
    saved = event(15, "saved", step=41, saved=40)
    write(run_dir.training, resumed(run_dir, 0, 4, 11), saved, resumed(run_dir, 40, 3, 31))
    first, second = started(0, [[0, 1], [2, 3]], 10), started(1, [[0, 1, 2]], 30)
    write(run_dir.events, first, failed(0, 47, 3), second, failed(1, 44, 2, 40))
    return view_run(run_dir)


def test_the_step_that_failed_last_is_that_of_the_last_attempt(two_attempts):
    found = find_step(two_attempts, None)
    assert (found.number, found.rank, found.world_size, found.workers) == (45, 2, 3, (3,))
    assert (found.snapshot, found.failed) == (40, "ValueError")


def test_a_step_belongs_to_the_last_attempt_that_made_it(two_attempts):
    assert find_step(two_attempts, 43).world_size == 3
    later, earlier = find_step(two_attempts, 47), find_step(two_attempts, 12)
    assert (later.world_size, later.workers, later.snapshot) == (4, (2, 2), 40)
    assert (earlier.world_size, earlier.snapshot, earlier.rank) == (4, 0, 0)


def test_an_attempt_that_failed_in_the_step_comes_before_one_that_made_it_well(two_attempts):
    found = find_step(two_attempts, 48)
    assert (found.rank, found.failed, found.world_size) == (3, "ValueError", 4)


def test_a_step_that_no_attempt_came_to_is_refused(two_attempts):
    with pytest.raises(UsageError, match="has never made a step 49") as error:
        find_step(two_attempts, 49)
    assert error.value.why == "its last was 48"


def test_gradients_that_were_not_finite_say_step_rank_and_checksums(run_dir):
    bad = event(12, "not_finite", step=30, ranks=[1, 2], gradients=[7, 7, 7])
    write(run_dir.training, resumed(run_dir, 0, 3, 11), bad)
    write(run_dir.events, started(0, [[0, 1, 2]], 10), failed(0, 29, 0))
    found = find_step(view_run(run_dir), None)
    assert (found.number, found.rank, found.gradients) == (30, 1, (7, 7, 7))
    assert found.failed == "its gradients were not finite"


def test_the_workers_look_for_snapshots_behind_a_url(run_dir):
    write(run_dir.training, resumed(run_dir, 0, 1, 11, folder="s3://bucket/run"))
    write(run_dir.events)
    assert find_step(view_run(run_dir), 5).snapshot is None


def test_without_a_list_of_all_nodes_the_ranks_are_on_one(run_dir):
    write(run_dir.training, resumed(run_dir, 0, 40, 11))
    write(run_dir.events, started(0, [list(range(32))], 10))
    assert find_step(view_run(run_dir), 5).workers == (40,)


def test_a_run_that_goes_on_can_be_asked_for_a_step_that_its_record_has_not_reached(run_dir):
    write(run_dir.training, resumed(run_dir, 40, 2, 11))
    write(run_dir.events, started(0, [[0, 1]], 10))
    assert find_step(view_run(run_dir), 77).snapshot == 40
    with pytest.raises(UsageError, match="has never made a step 40"):
        find_step(view_run(run_dir), 40)


def test_a_step_older_than_all_snapshots_is_refused_with_those_there_are(run_dir):
    os.rmdir(os.path.join(run_dir.snapshots, "step-000000000"))
    write(run_dir.training, resumed(run_dir, 0, 2, 11), event(12, "save", step=40))
    write(run_dir.events, started(0, [[0, 1]], 10))
    with pytest.raises(NotFoundError, match="no snapshot from before step 20") as error:
        find_step(view_run(run_dir), 20)
    assert "those of steps 20, 40" in error.value.why
    assert "--step 21 or later" in error.value.fix


def test_code_is_compared_with_what_ran(run_dir, tmp_path):
    view = view_run(run_dir)
    assert changed_code(view, str(tmp_path)) is None
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    (tmp_path / "same.py").touch()
    (tmp_path / "other.py").write_text("pass\n")
    files = [{"path": name, "sha256": empty} for name in ("same.py", "other.py", "gone.py")]
    write(run_dir.training, event(11, "code", files=files[:2]))
    assert changed_code(view, str(tmp_path)) == ("other.py",), "what the library has noted"
    ended = event(12, "worker_ended", attempt=0, rank=0, code={"files": files})
    write(run_dir.events, started(0, [[0]], 10), ended)
    view = view_run(run_dir)
    assert changed_code(view, str(tmp_path)) == ("other.py", "gone.py"), "and what rank 0 said last"
