import sys

import pytest
from click.shell_completion import ShellComplete

from torchmuster.core.cli.main import muster


def completed(words, incomplete):
    shell = ShellComplete(muster, {}, "muster", "_MUSTER_COMPLETE")
    return [(item.value, item.type) for item in shell.get_completions(words, incomplete)]


@pytest.mark.parametrize("words", [["torchrun"], ["torchrun", "--nnodes", "2"]])
def test_options_of_torchrun_and_ours_are_completed_without_torch(words):
    was_there = "torch" in sys.modules
    names = [name for name, _ in completed(words, "--n")]
    assert {"--nproc-per-node", "--nnodes", "--no-spread"} <= set(names)
    assert was_there or "torch" not in sys.modules


def test_a_script_of_torchrun_is_completed_by_the_shell():
    assert completed(["torchrun", "--nnodes", "2"], "tr") == [("tr", "file")]
