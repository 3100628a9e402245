"""Faults of the program: exceptions, branches that differ, uneven batches, ends without a word, hangs."""

from dataclasses import replace

from lab.live.case import PYTHON, fault, train

# Seconds of standing still are a hang here; a script without beats is judged by stacks and processor time.
IMPATIENT = ("--max-restarts", "0", "--tee", "none", "--hang-timeout", "4s:8s")


def trained(bench, *, until=None, **parts):
    """Write a script, train it with torchrun on both hosts and return what they said."""
    bench.script.write_text(train(**parts))
    return bench.torchrun(until=until)


def says(files, words):
    """Look that one of the logs holds these words: the fault has taken place."""
    texts = [path.read_text(errors="replace") for path in files]
    assert any(words in text for text in texts), "\n---\n".join(texts)


def never_says(files, words):
    """Look that none of the logs holds these words."""
    texts = [path.read_text(errors="replace") for path in files]
    assert not any(words in text for text in texts), "\n---\n".join(texts)


def explained(bench, said=None, never=None, **parts):
    """Train so, look that the fault has taken place by what the logs say, and return what explain says of them."""
    files = trained(bench, **parts)
    if said is not None:
        says(files, said)
    if never is not None:
        never_says(files, never)
    return bench.explain(files)


def muster_run(bench, *options, **parts):
    """Write a script of these parts, do `muster run` with it, and return what explain says of that."""
    bench.script.write_text(train(**parts))
    return bench.muster(*options, str(bench.script))


@fault("exception", quick=True)
def one_rank_raises(bench):
    return explained(bench, at_step="if RANK == 1 and step == 3: raise ValueError('bad batch')")


@fault("exception")
def one_rank_has_a_breakpoint(bench):
    return explained(bench, "BdbQuit", at_step="if RANK == 1 and step == 2: breakpoint()")


@fault("exit-code")
def one_rank_leaves_with_a_code_and_no_word(bench):
    return explained(bench, "exitcode: 7", at_step="if RANK == 1 and step == 2: os._exit(7)")


@fault("bad-arguments")
def script_refuses_its_arguments(bench):
    options = "import argparse; a = argparse.ArgumentParser(); a.add_argument('--lr', type=float); a.parse_args()"
    bench.script.write_text(train(before=options))
    return bench.explain(bench.torchrun(*bench.usual(), str(bench.script), "--lr", "small"))


@fault("bad-arguments")
def torchrun_gets_an_option_that_it_has_not(bench):
    bench.script.write_text(train())
    return bench.explain(bench.torchrun(*bench.usual(), "--gpus-per-node=4", str(bench.script)))


@fault("no-launcher", quick=True)
def script_is_started_without_a_launcher(bench):
    bench.script.write_text(train())
    return bench.explain(bench.together([PYTHON, str(bench.script)]))


@fault("no-gpu")
def cuda_is_asked_for_where_there_is_none(bench):
    return explained(bench, "CUDA", at_step="torch.ones(1).to('cuda:0')")


@fault("collectives-differ", "rank-missing-in-collective")
def one_rank_takes_another_branch(bench):
    return explained(
        bench, never="step 7 ", at_step="if RANK == 1 and step == 3: dist.barrier()", timeout_s=4
    )


@fault("collectives-differ")
def one_rank_takes_another_branch_and_torch_looks(bench):
    branch = "if RANK == 1 and step == 3: dist.all_gather([torch.ones(1)] * 2, torch.ones(1))"
    bench.script.write_text(train(at_step=branch, timeout_s=4))
    files = bench.torchrun(env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    says(files, "mismatch")
    return bench.explain(files)


@fault("rank-ended-early")
def one_rank_has_fewer_batches(bench):
    return explained(bench, "exitcode: 1", at_step="if RANK == 1 and step == 5: break", timeout_s=6)


@fault("rank-missing-in-collective", "ranks-missing-at-barrier")
def one_rank_is_slower_than_the_time_out(bench):
    return explained(
        bench, "imed out", at_step="if RANK == 1 and step == 3: time.sleep(12)", timeout_s=4
    )


@fault("collectives-differ")
def ranks_reduce_tensors_of_different_size(bench):
    wrong = "if step == 3: dist.all_reduce(torch.ones(4 + 60000 * RANK))"
    return explained(bench, never="step 7 ", at_step=wrong, timeout_s=5)


@fault("models-differ")
def ranks_build_different_models(bench):
    wrong = "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4 + RANK, 2)) if step == 1 else None"
    return explained(bench, never="step 7 ", at_step=wrong, timeout_s=8)


@fault("unused-parameters")
def model_has_a_layer_that_no_loss_uses(bench):
    model = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    def forward(self, x):
        return self.used(x)
"""
    step = (
        "net = torch.nn.parallel.DistributedDataParallel(Net()) if step == 0 else net\n"
        "net(torch.ones(1, 4)).sum().backward()"
    )
    return bench.explain(trained(bench, before=model, at_step=step))


@fault("killed", quick=True)
def one_rank_is_killed(bench):
    return explained(
        bench, "exitcode: -9", at_step="if RANK == 1 and step == 3: os.kill(os.getpid(), 9)"
    )


@fault("segfault")
def one_rank_reads_address_zero(bench):
    return explained(
        bench,
        "exitcode: -11",
        before="import ctypes",
        at_step="if RANK == 1 and step == 3: ctypes.string_at(0)",
    )


@fault("aborted")
def one_rank_aborts_in_native_code(bench):
    return explained(bench, "exitcode: -6", at_step="if RANK == 1 and step == 3: os.abort()")


LOADER = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if RANK == 1 and index == 1:
            os.kill(os.getpid(), 9)
        return torch.ones(2)
"""


@fault("killed")
def loader_process_is_killed(bench):
    loading = "if step == 1: list(torch.utils.data.DataLoader(Data(), num_workers=1, batch_size=4))"
    return explained(bench, "DataLoader worker", before=LOADER, at_step=loading)


@fault("rank-missing-in-collective")
def one_rank_waits_for_data_for_ever(bench):
    told = muster_run(
        bench,
        *IMPATIENT,
        at_step="if RANK == 1 and step == 60: time.sleep(600)",
        steps=100,
        timeout_s=600,
    )
    assert "rank 1 stood still" in told.text
    return told


@fault("rank-missing-in-collective")
def one_rank_is_stopped_by_a_signal(bench):
    told = muster_run(
        bench,
        *IMPATIENT,
        at_step="if RANK == 1 and step == 60: os.kill(os.getpid(), 19)",
        steps=100,
        timeout_s=600,
    )
    assert "SIGSTOP" in told.text
    return told


@fault("collectives-differ")
def one_rank_is_in_another_branch_and_hangs(bench):
    branch = "if RANK == 1 and step == 60: dist.recv(torch.ones(1), 0)"
    return muster_run(bench, *IMPATIENT, at_step=branch, steps=100, timeout_s=600)


WATCHED = """
import os, time, torch
import torchmuster.train as tm
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 20
    def __getitem__(self, index):
        time.sleep(0.03 if os.environ["RANK"] == "1" else 0.0)
        return torch.randn(4)
world = tm.init()
model = world.wrap(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = world.loader(Numbers(), global_batch_size=world.world_size)
run = world.resume(model=model, optimizer=optimizer, data=data, every_steps=10**9)
for _ in run.epochs(1):
    for batch in data:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        run.step()
        if run.steps_done >= 400:  # of 0.03 s: reports come every two seconds
            raise SystemExit(0)
        time.sleep(0.002)
"""


@fault("slow-rank")
def one_rank_reads_its_data_slowly(bench):
    bench.script.write_text(WATCHED)
    told = bench.muster("--tee", "none", str(bench.script))
    assert told.first == "healthy", told.text  # the run ends well: it is only slow
    assert any("rank 1 on n2 is" in note and "data takes" in note for note in told.notes), told.text
    return replace(told, first="slow-rank")
