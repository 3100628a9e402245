"""The scripts that docs/train.md compares do run: each on two workers, twice, so that it resumes."""

import importlib.util
import os
from pathlib import Path

import pytest

from kit.command import MUSTER, ran

FOLDER = Path(__file__).parents[2] / "examples" / "side_by_side"
NEEDS = {
    "with_torchmuster.py": "torch",
    "with_ddp.py": "torch",
    "with_fabric.py": "lightning",
    "with_accelerate.py": "accelerate",
}

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize("script", NEEDS)
def test_a_script_of_the_comparison_trains_and_resumes(script, tmp_path):
    if importlib.util.find_spec(NEEDS[script]) is None:
        pytest.skip(f"the extra `frameworks` is not installed: no {NEEDS[script]}")
    variables = {"MUSTER_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1", "NODES": "1"}
    line = [*MUSTER, "run", "--nproc-per-node", "2"]
    for _ in range(2):
        ended = ran([*line, FOLDER / script], limit_s=80, env=os.environ | variables, cwd=tmp_path)
        assert ended.returncode == 0, ended.stdout + ended.stderr
