"""Pairs of features: twenty draws of a fixed seed, and what other draws have found; `make pairs` draws more."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pairs import play as played
from pairs.command import features_here, smallest
from pairs.draw import draw, pairs_of, possible_pairs
from pairs.features import FEATURES, OFF, cells, named, read, why_not
from pairs.stage import Stage

SEED, NUMBER = 16, 20
IN_FIVE_MINUTES = 4  # of them, on two cores that others use, too; the rest in the long form
# Fresh interpreters and the limits of hangs take most of the time of `make pairs`; other tests have them.
QUICK = features_here() | {"start": ("auto",), "fault": ("none", "kill", "raise", "exit")}
FOUND = Path(__file__).with_name("found.txt").read_text().splitlines()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=named(case), marks=[pytest.mark.lab] * (number >= IN_FIVE_MINUTES))
        for number, case in enumerate(draw(SEED, NUMBER, QUICK))
    ],
)
def test_a_drawn_case_keeps_what_is_promised(case):
    played.play(case)


@pytest.mark.parametrize("line", [line for line in FOUND if not line.startswith("#")])
def test_what_was_found_stays_mended(line):
    played.play(read(line.split()))


def test_the_draws_have_every_pair_of_values_that_a_case_can_have():
    some = {name: FEATURES[name] for name in ("what", "where", "nodes", "spares", "fault", "end")}
    cases = draw(7, 60, some)
    assert set().union(*map(pairs_of, cases)) == possible_pairs(some)
    assert all(why_not(case) is None for case in cases)
    assert draw(7, 3, some) == cases[:3] != draw(8, 3, some)


def test_words_of_a_case_are_read_as_that_case():
    for case in draw(3, 20):
        assert read(named(case).split()) == case
    with pytest.raises(ValueError, match="features are what, "):
        read(["wat=run"])


def test_what_starts_where_is_that_of_the_page():
    assert cells()["`muster torchrun`", "session"] == "no: 3"
    assert why_not({"what": "torchrun", "where": "session"}) is not None
    assert why_not({"what": "run", "where": "session"}) is None


def test_a_failure_is_made_as_small_as_it_still_fails():
    case = next(c for c in draw(3, 40) if c["workers"] == "2" and c["end"] == "TERM")

    def broken(less):
        fails = less["workers"] == "2" and less["end"] == "TERM"
        return played.BrokenError("exit", "of this test") if fails else None

    found, _ = smallest(case, broken(case), broken)
    assert [f for f in FEATURES if found[f] != OFF[f]] == ["workers", "end"]


@pytest.fixture(scope="module")
def kept():
    """A case that was played and has held, with its stage; tests tell the judge a lie about it."""
    case = read(["end=TERM"])
    with Stage(case) as stage:
        playing = played.Play(stage)
        playing.all()
        yield playing


def lie(monkeypatch, stage, command, **changed):
    """Let a command of muster say something else than it does."""
    real = stage.type

    def other(*words):
        said = real(*words)
        if words[0] != command:
            return said
        return replace(
            said, **{name: change(getattr(said, name)) for name, change in changed.items()}
        )

    monkeypatch.setattr(stage, "type", other)


def broken_by(judge):
    with pytest.raises(played.BrokenError) as caught:
        judge()
    return caught.value.promise


def test_the_judge_sees_another_exit_code(kept):
    (ended, *_) = (said for said in kept.stage.typed if said.code == 75)
    kept.judge_code(ended)
    assert broken_by(lambda: kept.judge_code(replace(ended, code=143))) == "exit"


@pytest.mark.parametrize(
    ("command", "changed"),
    [
        ("top", {"out": lambda text: text.replace('"state": "', '"state": "un')}),
        ("ps", {"out": lambda text: text.replace("succeeded", "failed")}),
        ("status", {"out": lambda text: text.replace("succeeded", "failed")}),
        ("logs", {"out": lambda text: text.replace("begins", "ends")}),
        ("explain", {"code": lambda code: code + 70}),
        ("report", {"code": lambda code: code + 1}),
    ],
)
def test_the_judge_sees_a_view_that_says_something_else(kept, monkeypatch, command, changed):
    lie(monkeypatch, kept.stage, command, **changed)
    assert broken_by(lambda: kept.judge_views(kept.stage.typed[-1])) == "views"


def test_the_judge_sees_other_weights_and_lost_samples(kept, monkeypatch):
    kept.judge_work()
    monkeypatch.setattr(played, "undisturbed", lambda *_: "others")
    assert broken_by(kept.judge_work) == "weights"
    monkeypatch.undo()
    (record, *_) = kept.stage.home.rglob("training.jsonl")
    text = record.read_text()
    record.write_text(text.replace('"lost": 0', '"lost": 1'))
    assert broken_by(kept.judge_work) == "ledger"
    record.write_text(text)


def test_the_judge_sees_a_restart_that_begins_too_early(kept, monkeypatch):
    began = {kept.name: 0}
    kept.judge_saved(began)
    assert broken_by(lambda: kept.judge_saved({kept.name: 1000})) == "saved"


@pytest.mark.parametrize(
    ("text", "promise"),
    [
        ('  File "/a/src/torchmuster/head/head.py", line 1, in run\n', "trace"),
        ('    [rank0]:   File "/a/src/torchmuster/files/atomic.py", line 1\n', "trace"),
        ("hint: muster logs nobody-0000\n", "hints"),
        ("; continue with: muster restart nobody-0000\n", "hints"),
    ],
)
def test_the_judge_sees_a_traceback_of_ours_and_a_hint_that_leads_nowhere(kept, text, promise):
    kept.judge_words()
    typed = tuple(kept.stage.typed)
    kept.stage.keep(replace(typed[0], err=text))
    assert broken_by(kept.judge_words) == promise
    kept.stage.typed[:] = typed


def test_the_judge_sees_what_is_left(kept, monkeypatch):
    kept.judge_left()
    lying = kept.stage.temporary / "muster-1"
    lying.touch()
    assert broken_by(kept.judge_left) == "left"
    lying.unlink()
    monkeypatch.setattr(played, "LEFT_S", 0.2)
    with subprocess.Popen(["sleep", "60"], env=kept.stage.env) as sleeper:
        assert broken_by(kept.judge_left) == "left"
        sleeper.kill()
