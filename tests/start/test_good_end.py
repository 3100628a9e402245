"""What follows the good end of a script: a death on the way out, and a world that never met."""

import json

import pytest

from start.ways import FORKED, FRESH, Place

DIES_LEAVING = """
import atexit, os
if os.environ["RANK"] == "1":
    atexit.register(os.abort)
"""
ALONE = "import torch\nmodel = torch.nn.Linear(2, 1)\nmodel(torch.ones(1, 2)).sum().backward()\n"
TOGETHER = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""
STARTS = {FORKED: "auto", FRESH: "fresh"}
NEVER_MET = "2 workers never formed a process group: if this was training, each trained alone"


def run_two(place: Place, script: str, *options: str):
    place.write("prog.py", script)
    options = ("--nproc-per-node", "2", *options)
    done = place.muster("prog.py", options=(*options, "--run-id", "r"))
    return done, json.loads((place.home / "runs" / "r" / "result.json").read_text())


@pytest.mark.parametrize("way", [FORKED, FRESH])
def test_a_rank_that_dies_leaving_after_its_script_ended_well_is_not_started_again(place, way):
    done, result = run_two(place, DIES_LEAVING, "--start", STARTS[way])

    assert done.code == 0, done.stderr
    assert result["attempts"] == 1
    (note,) = result["notes"]
    assert note.startswith("rank 1 on n1 died of SIGABRT while its interpreter was exiting")
    assert f"muster: {note}\n" in done.stderr


def test_an_exit_code_of_the_scripts_own_exit_handler_is_the_scripts_word(place):
    script = "import atexit, os\natexit.register(os._exit, 3)\n"
    done, result = run_two(place, script, "--max-restarts", "0")
    assert (done.code, result["exit_code"]) == (3, 3)


@pytest.mark.short
def test_workers_that_never_met_are_told_of_and_the_run_has_succeeded(place):
    done, result = run_two(place, ALONE)

    assert (done.code, result["state"]) == (0, "succeeded")
    assert result["notes"] == [NEVER_MET]
    assert f"muster: {NEVER_MET}\n" in done.stderr
    assert NEVER_MET in place.muster_command("status", "r").stdout


def test_workers_that_met_are_not_told_of_even_when_they_have_parted(place):
    done, result = run_two(place, TOGETHER)
    assert (done.code, result["notes"]) == (0, []), done.stderr


@pytest.mark.parametrize(
    ("script", "options"),
    [("print('no torch')", ()), (ALONE, ("--start", "fresh"))],
    ids=["a script without torch", "a fresh interpreter"],
)
def test_workers_that_nobody_can_judge_are_not_accused(place, script, options):
    done, result = run_two(place, script, *options)
    assert (done.code, result["notes"]) == (0, []), done.stderr
