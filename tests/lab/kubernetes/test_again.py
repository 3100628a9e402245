"""`muster restart` of a single run in real pods: it goes on from a volume, and says what went with the pods without one."""

import re

SCRIPT = """\
import os, sys
import torch
import torchmuster.train as tm
model = tm.wrap(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = tm.loader(torch.utils.data.TensorDataset(torch.ones(40, 1)), global_batch_size=4)
run = tm.resume(model=model, optimizer=optimizer, data=data, every_steps=1)
steps = 0
for epoch in run.epochs(1):
    for (x,) in data:
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps == 6 and not os.path.exists(os.path.join(sys.argv[1], "go")):
            os._exit(3)
print("steps of this run:", steps, flush=True)
"""
LIMIT_S = 240


def fail(bench):
    """Run a training in two pods that has saved some steps when it fails."""
    (bench.user.folder / "resumes.py").write_text(SCRIPT)
    words = ["run", "--on", "kubernetes", "--nodes", "2", "--nproc-per-node", "1"]
    words += ["--max-restarts", "0", "resumes.py", str(bench.shared)]
    assert bench.end(bench.start_words("r", *words), LIMIT_S) == 3
    bench.wait_nothing_left()


def test_a_run_on_a_volume_goes_on_from_its_last_snapshot(bench):
    bench.site(home=str(bench.shared / "home"))
    fail(bench)
    (saved,) = re.findall(r"saved at step (\d+); continue with: muster restart r", bench.said)
    (bench.shared / "go").touch()
    said = bench.must("restart", "r", limit_s=LIMIT_S)
    (resumed,) = map(int, re.findall(r"resuming after step (\d+)", said))
    assert resumed >= int(saved) > 0
    assert f"steps of this run: {10 - resumed}" in said
    bench.wait_nothing_left()


def test_what_was_on_the_disks_of_pods_is_refused_with_the_step_that_is_lost(bench):
    fail(bench)
    code, said = bench.user.run("restart", "r")
    assert code == 2
    assert re.search(r"error: the snapshots of r are gone: the last was of step \d", said)
    assert "went with them" in said
