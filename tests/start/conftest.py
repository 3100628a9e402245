"""Fixtures of the start tests: a place for programs, and what the probe finds there."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from kit.ports import reserve_port
from start.launching import Launch
from start.ways import FORKED, FRESH, PLAIN, Outcome, Place, make_place, together

PROBE = Path(__file__).with_name("probe.py")
DRAW = Path(__file__).with_name("draw.py")


@pytest.fixture
def place(tmp_path) -> Place:
    return make_place(tmp_path)


@pytest.fixture(scope="session")
def facts(tmp_path_factory) -> dict[str, dict]:
    """Return what the probe finds when it is started in each way, by the same words."""
    return probe_in_all_ways(make_place(tmp_path_factory.mktemp("facts")))


@pytest.fixture(scope="session")
def facts_with_flags(tmp_path_factory) -> dict[str, dict]:
    """Return the same with flags for the interpreter."""
    flags = ("-u", "-O", "-X", "dev", "-W", "error::UserWarning", "-s")
    return probe_in_all_ways(make_place(tmp_path_factory.mktemp("flags")), flags, ways=(FORKED,))


@pytest.fixture(scope="session")
def numbers(tmp_path_factory) -> list[dict]:
    """Return what 4 ranks drew in 2 attempts."""
    pytest.importorskip("torch", reason="it is torch's generator, among others")
    place = make_place(tmp_path_factory.mktemp("random"))
    shutil.copy(DRAW, place.cwd / "draw.py")
    done = place.muster("draw.py", options=("--nproc-per-node", "4", "--start", "fork"))
    assert done.code == 0, done.stderr
    return [json.loads(path.read_text()) for path in sorted(place.cwd.glob("numbers-*"))]


def probe_in_all_ways(
    place: Place, flags: tuple[str, ...] = (), ways: tuple[str, ...] = (FORKED, FRESH)
) -> dict[str, dict]:
    """Run the probe; muster's own output is a file, so that nothing of it fits a worker's pipe."""
    pytest.importorskip("torch", reason="the facts hold for programs with torch")
    place.write("sub/torchmuster/__init__.py", "")
    shutil.copy(PROBE, place.cwd / "sub" / "probe.py")
    words = ("sub/probe.py", "--lr", "0.1", "-m")

    def in_muster(way: str) -> Outcome:
        start = {FORKED: "auto", FRESH: "fresh"}[way]
        python = ("--python", " ".join([sys.executable, *flags])) if flags else ()
        options = ("--nproc-per-node", "1", "--start", start, *python)
        path = place.cwd.parent / f"stdout-{way}"
        with open(path, "wb") as stdout:
            os.write(stdout.fileno(), b"something was here before\n")
            done = place.muster(*words, options=options, stdout=stdout.fileno())
        return Outcome(done.code, path.read_text(), done.stderr)

    calls = [lambda: place.plain(*words, python=(sys.executable, *flags))]
    calls += [lambda way=way: in_muster(way) for way in ways]
    outcomes = dict(zip((PLAIN, *ways), together(*calls), strict=True))
    return {way: outcome.facts() for way, outcome in outcomes.items()}


@pytest.fixture
def port():
    """Return a port that was free a moment ago."""
    return reserve_port()


@pytest.fixture
def launch(tmp_path) -> Launch:
    return Launch(tmp_path)
