"""The page of a real run, and its pictures in the docs: `pytest tests/report/test_pictures.py --update-golden` takes them."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

from kit.browser import Look, chromium, needs_chromium
from kit.command import run_muster

pytestmark = [needs_chromium(), pytest.mark.slow]
DOCS = Path(__file__).parents[2] / "docs" / "pictures"
SCRIPT = Path(__file__).with_name("trains.py")
MAX_BYTES = 300_000


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Give the page of a run of two simulated nodes, of which one loses a rank."""
    folder = tmp_path_factory.mktemp("real")
    shutil.copy(SCRIPT, folder / "train.py")
    env = {**os.environ, "MUSTER_HOME": str(folder / "home")}
    words = ["--nodes", "2", "--nproc-per-node", "2", "--run-id", "train-3f2a", "train.py"]
    done = run_muster("run", *words, env=env, cwd=folder, limit_s=170)
    assert done.returncode == 0, done.stderr
    path = folder / "report.html"
    done = run_muster("report", "train-3f2a", "-o", str(path), env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    told = run_muster("report", "train-3f2a", "--json", env=env, cwd=folder)
    return path, json.loads(told.stdout)


def test_the_story_of_a_real_run(page):
    _, story = page

    assert story["ending"]["state"] == "succeeded"
    first, second = story["attempts"]
    assert (first["ended_by"], first["kept_step"]) == ("SIGKILL in rank 3 on n2", 400)
    assert second["first_step"] == 400
    assert {s["name"] for s in story["training"]["series"]} >= {"loss", "error"}
    assert [one["samples"] for one in story["training"]["epochs"]] == [4096] * 10
    assert story["what"]["software"][0]["torch"]
    assert story["what"]["user"]
    assert len(story["ranks"]["totals"]) == 4
    assert 0 < story["cost"]["goodput"] < 1
    parts = [story["cost"][part] for part in ("starting_s", "kept_s", "lost_s", "restarting_s")]
    assert sum(parts) == pytest.approx(story["cost"]["held_s"])


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1280, "dark"), (400, "light")])
def test_a_picture_of_each_form(page, width, theme, request, tmp_path):
    path, _ = page
    name = f"report-{width}-{theme}.png"
    target = DOCS if request.config.getoption("--update-golden") else tmp_path
    os.makedirs(target, exist_ok=True)
    with chromium() as browser, Look(browser, path, width=width, theme=theme) as look:
        assert look.violations() == []
        look.page.screenshot(path=target / name)
        assert look.said == look.asked == []

    for picture in (target / name, DOCS / name):
        data = picture.read_bytes()
        assert struct.unpack(">2I", data[16:24]) == (width, 900)
        assert 10_000 < len(data) < MAX_BYTES  # not blank, and no burden for a clone
