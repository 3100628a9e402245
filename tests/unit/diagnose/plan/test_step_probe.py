import json
import os
import sys

import pytest

from kit.command import ran
from torchmuster.diagnose.plan import step_probe

SCRIPT = """
import sys
from datetime import datetime
import torch
assert __name__ == "__main__"
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
steps, micro_steps = int(sys.argv[1]), int(sys.argv[2])
for step in range(steps):
    optimizer.zero_grad()
    for _ in range(micro_steps):
        model(torch.randn(16, 64)).sum().backward()
    optimizer.step()
    print("step", step, flush=True)
print("after")
"""


def probe(folder, *words, num_steps=6, script=SCRIPT):
    (folder / "train.py").write_text(script)
    argv = [sys.executable, step_probe.__file__, str(num_steps), "60", "train.py", *words]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return ran(argv, limit_s=90, cwd=folder, env=env | {"CUDA_VISIBLE_DEVICES": ""})


def found_in(done):
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(step_probe.MARK)]
    return json.loads(line.removeprefix(step_probe.MARK))


def test_a_script_is_ended_after_its_steps_and_said_what_they_were_made_of(tmp_path):
    done = probe(tmp_path, "1000", "1")
    found = found_in(done)
    assert done.returncode == 0, done.stderr
    assert "after" not in done.stdout
    assert found["steps"] == 6
    assert found["micro_steps"] == 1
    assert found["parameters"] == 64 * 128 + 128 + 128 * 8 + 8
    assert (found["dtype"], found["device"]) == ("float32", "cpu")
    assert min(found[part] for part in ("forward_s", "backward_s", "optimizer_s")) > 0


@pytest.mark.lab
def test_gradients_are_listed_by_their_arrival_within_the_backward_pass(tmp_path):
    found = found_in(probe(tmp_path, "1000", "1"))
    sizes = [size for size, _ in found["gradients"]]
    times = [ready_s for _, ready_s in found["gradients"]]
    assert sum(sizes) == 4 * found["parameters"]
    assert times == sorted(times)
    assert sizes.index(4 * 128 * 8) < sizes.index(4 * 64 * 128)  # the last layer's come first


@pytest.mark.lab
def test_micro_steps_are_counted(tmp_path):
    assert found_in(probe(tmp_path, "1000", "3"))["micro_steps"] == 3


@pytest.mark.lab
def test_a_script_that_ends_early_tells_of_the_steps_it_made(tmp_path):
    done = probe(tmp_path, "9", "1", num_steps=100)
    assert found_in(done)["steps"] == 9 - 1 - step_probe.WARM_STEPS  # the first has no begin
    assert "after" in done.stdout


@pytest.mark.parametrize("steps", ["0", "4"])
@pytest.mark.lab
def test_too_few_steps_say_nothing(tmp_path, steps):
    done = probe(tmp_path, steps, "1")
    assert done.returncode == 0
    assert step_probe.MARK not in done.stdout


def test_a_script_that_fails_fails_as_it_would(tmp_path):
    done = probe(tmp_path, script="raise ValueError('mine')")
    assert done.returncode == 1
    assert "ValueError: mine" in done.stderr


def test_one_slow_step_is_no_spread():
    assert step_probe.spread_of([1.0] * 9 + [50.0]) == 0
    assert step_probe.spread_of([0.9, 0.95, 1.0, 1.05, 1.1]) == pytest.approx(0.11, abs=0.02)
