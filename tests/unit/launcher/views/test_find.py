import os
import random

import pytest

from kit.records import result
from kit.values import run_result
from torchmuster.core import proc
from torchmuster.core.files.atomic import write_json
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.codec import moment_of
from torchmuster.core.model.states import RunState
from torchmuster.core.owner.create import write_owner
from torchmuster.errors import NotFoundError
from torchmuster.launcher.views import find


@pytest.fixture
def make_run(home):
    """Return a function that makes a run with these lines of its record."""

    def make(name, *events, submitted=None):
        run_dir = RunDir(str(home / "runs" / name))
        os.makedirs(run_dir.path)
        with open(run_dir.events, "w") as file:
            file.write("".join(events))
        if submitted is not None:
            write_json(run_dir.plan, {})
            os.utime(run_dir.plan, (submitted, submitted))
        return run_dir

    return make


def event(name, time="2026-01-01T00:00:00Z"):
    return f'{{"time":"{time}","event":"{name}","attempt":0}}\n'


def test_a_run_is_found_by_its_id_by_a_part_of_it_and_by_its_path(make_run):
    run_dir = make_run("20260101-digits-ab12", submitted=1)

    for word in ("20260101-digits-ab12", "20260101", "digits", run_dir.path):
        assert find.find_run(word).run_id == "20260101-digits-ab12"


def test_an_exact_name_wins_over_those_that_begin_with_it(make_run):
    make_run("digits")
    make_run("digits-2")

    assert find.find_run("digits").run_id == "digits"


def test_a_name_that_was_given_wins_over_the_end_of_another(make_run):
    for name in ("20260101-000000-sus2", "20260101-000001-s2-9409"):
        make_run(name, submitted=1)

    assert find.find_run("s2").run_id == "20260101-000001-s2-9409"
    assert find.find_run("us2").run_id == "20260101-000000-sus2"


def test_a_name_means_the_last_of_runs_that_go_on_with_each_other(make_run):
    first, second, other = (
        make_run(f"20260101-00000{n}-base-000{n}", submitted=n) for n in range(3)
    )
    os.mkdir(first.snapshots)
    os.symlink(first.snapshots, second.snapshots)

    with pytest.raises(NotFoundError, match="`base` names 3 runs"):
        find.find_run("base")
    os.rename(other.path, other.path.replace("base", "else"))
    assert find.find_run("base").run_dir.path == second.path


def test_the_last_run_is_the_one_submitted_last_though_it_waits_and_another_began_since(make_run):
    began = event("run_started", "2026-03-01T00:00:00Z")
    make_run("running", began, submitted=moment_of("2026-01-01T00:00:00Z"))
    # A job in a queue has left no event.
    make_run("queued", submitted=moment_of("2026-01-02T00:00:00Z"))

    assert find.find_run("last").run_id == "queued"
    assert [view.run_id for view in find.all_runs()] == ["running", "queued"]


def test_a_run_whose_client_wrote_its_files_again_keeps_its_place(make_run):
    first, second = (make_run(name, submitted=1_800_000_000) for name in ("first", "second"))
    for run_dir, submitted in ((first, 1_767_225_600), (second, 1_767_312_000)):
        write_json(run_dir.secret, {})
        os.utime(run_dir.secret, (submitted, submitted))
    write_json(first.owner, {})  # a detached supervisor, a later link

    assert find.find_run("last").run_id == "second"


def test_open_runs_are_listed_though_many_came_after_them(make_run):
    write_owner(make_run("a-lives", event("attempt_started")))
    for number in range(25):
        make_run(f"b-{number:02}", event("attempt_started", f"2026-02-01T00:00:{number:02}Z"))

    shown = [view.run_id for view in find.newest_and_open(20)]

    assert shown == ["a-lives", *(f"b-{number:02}" for number in range(5, 25))]


@pytest.mark.parametrize("touched", [False, True])
def test_of_thousands_that_have_ended_only_the_last_are_looked_into(make_run, monkeypatch, touched):
    numbers = list(range(59))
    random.Random(3).shuffle(numbers)
    for number in numbers:
        begun = f"2026-02-01T00:00:{number:02}Z"
        made = make_run(f"b-{number:02}", event("attempt_started", begun))
        write_json(made.result, result())
        if touched:
            os.utime(made.path, (moment_of(begun), moment_of(begun)))
    looked, view_run = [], find.view_run
    monkeypatch.setattr(find, "view_run", lambda one: looked.append(one) or view_run(one))

    shown = [view.run_id for view in find.newest_and_open(20)]

    assert shown == [f"b-{number:02}" for number in range(39, 59)]
    assert len(looked) == 20


@pytest.mark.parametrize("seed", range(20))
def test_the_last_and_the_open_ones_are_those_that_a_look_at_all_finds(make_run, seed):
    dice = random.Random(seed)
    base = moment_of("2026-02-01T00:00:00Z")
    for number in range(dice.randrange(1, 40)):
        begun = f"2026-02-01T00:{dice.randrange(60):02}:00Z"
        events = [event("attempt_started", begun)] if dice.random() < 0.8 else []
        made = make_run(f"r-{number:02}", *events)
        for path in (made.plan, made.secret, made.owner):
            if dice.random() < 0.5:
                write_json(path, {})
        if dice.random() < 0.7:
            write_json(made.result, result())
        asked = base + dice.randrange(3600)
        for name in os.listdir(made.path):
            os.utime(os.path.join(made.path, name), (asked, asked + dice.randrange(900)))
        os.utime(made.path, (asked, asked + 900 + dice.randrange(7200)))
    views = [view for view in find.all_runs() if find._is_of_user(view.run_dir)]
    most = dice.randrange(1, 12)
    first = max(0, len(views) - most)

    last = sorted((view.submitted, view.run_id) for view in views)[first:]
    wanted = {run_id for _, run_id in last} | {v.run_id for v in views if not v.state.is_final}
    found = find.newest_and_open(most)
    assert {(v.submitted, v.run_id) for v in found} >= set(last) or len(
        {v.submitted for v in views}
    ) < len(views), "equal times may take either"
    assert len(found) == len(wanted)
    assert [v.submitted for v in found] == sorted(v.submitted for v in found)


def test_a_folder_of_runs_that_is_a_file_is_told_of(home):
    home.mkdir()
    (home / "runs").write_text("")

    with pytest.raises(NotFoundError, match="the folder of all runs can't be read"):
        find.all_runs()


def test_what_a_sweep_holds_on_a_host_is_nothing_that_the_user_started(make_run):
    make_run("20260101-000000-swim-ab12", event("run_started"))
    slot = make_run("20260102-000000-session-sweep-2c7a0e-0-1d62", event("run_started"))

    assert find.find_run("last").run_id == "20260101-000000-swim-ab12"
    assert find.find_run("sw").run_id == "20260101-000000-swim-ab12"
    assert find.find_run("session-sweep-2c7a0e-0-1d62").run_dir.path == slot.path
    assert len(find.all_runs()) == 2
    assert len(find.newest_and_open(20)) == 1


def test_the_last_run_is_the_one_that_began_last(make_run):
    make_run("a", event("run_started", "2026-02-01T00:00:00Z"))
    make_run("b", event("run_started", "2026-01-01T00:00:00Z"))

    assert find.find_run("last").run_id == "a"
    assert [view.run_id for view in find.all_runs()] == ["b", "a"]


@pytest.mark.parametrize("word", ["", ".", "..", "other", "../runs", "/tmp"])
def test_a_word_that_names_no_run_finds_none(make_run, word):
    make_run("digits")

    with pytest.raises(NotFoundError, match="there is no run"):
        find.find_run(word)


def test_without_any_run_nothing_is_found(make_run):
    assert find.all_runs() == []
    with pytest.raises(NotFoundError):
        find.find_run("last")


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], RunState.STARTING),
        ([event("run_started")], RunState.STARTING),
        ([event("waiting")], RunState.WAITING),
        ([event("waiting"), event("attempt_started")], RunState.RUNNING),
    ],
)
def test_the_state_of_a_living_run_is_what_its_events_say(make_run, events, state):
    run_dir = make_run("r", *events)
    write_owner(run_dir)

    assert find.view_run(run_dir).state is state


def test_a_run_without_owner_and_result_is_lost(make_run):
    run_dir = make_run("r", event("attempt_started"))

    assert find.view_run(run_dir).state is RunState.LOST


def test_the_result_says_the_state_whatever_became_of_the_owner(make_run):
    run_dir = make_run("r", event("attempt_started"))
    write_json(run_dir.result, codec.to_plain(run_result()))

    view = find.view_run(run_dir)
    assert (view.state, view.result) == (RunState.SUCCEEDED, run_result())


def test_a_torn_line_of_the_record_is_left_out(make_run):
    run_dir = make_run("r", event("attempt_started"), '[1]\n{"time":"2026')

    assert len(find.view_run(run_dir).record.attempts) == 1


@pytest.mark.parametrize(
    ("change", "lives"),
    [
        ({}, True),
        ({"start_ticks": -1}, False),  # the pid was given to another process
        ({"pid": 2**22 + 1}, False),
        ({"boot_id": "another boot"}, False),  # this machine was booted again
        ({"boot_id": "another boot", "host": "elsewhere"}, True),  # can't be known from here
    ],
)
def test_an_owner_lives_while_that_very_process_does(make_run, change, lives):
    run_dir = make_run("r")
    facts = proc.read_process(os.getpid())
    owner = {"pid": os.getpid(), "start_ticks": facts.start_ticks}
    owner |= {"boot_id": proc.boot_id(), "host": os.uname().nodename}
    write_json(run_dir.owner, owner | change)

    assert find.owner_lives(run_dir) is lives
