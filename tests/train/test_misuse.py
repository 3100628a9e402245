"""Mistakes that a tired person makes: each is an error with words, or can't be made."""

import numpy as np
import pytest
import torch
from torch import nn

import torchmuster.train as tm
from torchmuster.core.net.ipc import CallFailed
from torchmuster.core.node.workers import HeldMemory
from torchmuster.errors import UsageError
from torchmuster.train.memory import NodeMemory
from torchmuster.train.snapshot.state import MisfitError, SnapshotError
from torchmuster.train.wrap import WeightedDDP


class Ones(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((3,), float(index))


def begin(world, *, samples=10, batch=4, folder="snapshots", model=None, **options):
    """Return model, optimizer, loader and run of a small job."""
    loading = {k: options.pop(k) for k in ("accumulate", "drop_last") if k in options}
    model = world.wrap(model or nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = world.loader(Ones(samples), global_batch_size=batch, **loading)
    run = world.resume(model=model, optimizer=optimizer, data=data, folder=folder, **options)
    return model, optimizer, data, run


def again(world, **options):
    """Leave the world and begin the job anew, as the next attempt would."""
    world.close()
    return begin(tm.init(seed=0), **options)


def train(model, optimizer, data, run, *, epochs=1, stop_after=None):
    for _ in run.epochs(epochs):
        for x in data:
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.steps_done + 1 == stop_after:
                run.save()
            elif stop_after is not None and run.steps_done >= stop_after:
                return


def only_count(data, run, *, times):
    for _ in run.epochs(1):
        for _x in data:
            for _i in range(times):
                run.step()


def message(error):
    return f"{error.value.what}\n{error.value.explain_to_user()}"


@pytest.mark.parametrize(
    ("times", "words"),
    [
        pytest.param(1, "no optimizer has stepped", id="a forgotten optimizer.step"),
        pytest.param(2, "called twice for one batch", id="a batch counted twice"),
    ],
)
def test_counting_what_was_not_one_step_is_an_error(world, times, words):
    _, _, data, run = begin(world)
    with pytest.raises(UsageError, match=words):
        only_count(data, run, times=times)
    world.close()


def test_a_step_in_the_middle_of_an_accumulated_one_is_an_error(world):
    model, optimizer, data, run = begin(world, accumulate=2)
    with pytest.raises(UsageError, match="middle of an accumulated step"):
        train(model, optimizer, data, run)
    world.close()


def test_a_script_that_never_calls_step_is_counted_all_the_same(world):
    model, optimizer, data, run = begin(world)
    train(model, optimizer, data, run, epochs=2)
    assert run.steps_done == 6


def test_a_metric_that_is_not_a_scalar_is_named(world):
    _, _, _, run = begin(world)
    with pytest.raises(UsageError) as error:
        run.log(loss=torch.zeros(4))
    assert "the metric `loss` is not one number but a tensor of shape [4]" in message(error)
    assert "loss=loss.float().mean()" in message(error)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": 0}, "global_batch_size is 0, below one"),
        ({"accumulate": 0}, "accumulate is 0, below one"),
        ({"batch": 11, "drop_last": True}, "drop_last leaves no batch: 10 samples"),
        ({"samples": 0}, "the dataset is empty"),
        ({"every_steps": 0}, "every_steps is 0, below one"),
        ({"keep": 0}, "keep is 0, below one"),
        ({"when_busy": "drop"}, "when_busy is `wait` or `skip`"),
        (
            {"scheduler": object()},
            "`scheduler` can't be saved: its type object has no state_dict()",
        ),
    ],
)
def test_options_out_of_range_are_refused_before_anything_is_written(
    world, tmp_path, options, words
):
    with pytest.raises((UsageError, tm.DatasetError)) as error:
        begin(world, **options)
    assert words in message(error)
    assert not (tmp_path / "snapshots").exists()


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        pytest.param(
            tm.DatasetError,
            {"samples": 11},
            ["had 10 samples when the snapshot was made, it has 11 now"],
            id="a dataset that has grown",
        ),
        pytest.param(
            tm.SnapshotError,
            {"model": nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))},
            ["model.0.weight: not in the snapshot", "model.weight: not in the script"],
            id="another model",
        ),
        pytest.param(
            tm.SnapshotError,
            {"extra": nn.Linear(1, 1)},
            ["`extra` is in the script only"],
            id="other objects than were saved",
        ),
    ],
)
def test_what_differs_from_the_snapshot_is_refused_and_named(world, kind, options, words):
    train(*begin(world), stop_after=1)
    with pytest.raises(kind) as error:
        again(world, **options)
    assert [word for word in words if word not in message(error)] == []
    tm.current().close()


def test_a_state_that_only_a_pickle_could_hold_is_named_when_it_is_saved(world):
    class Strange:
        def state_dict(self):
            return {"socket": [object()]}

        def load_state_dict(self, state):
            raise AssertionError(state)

    model, optimizer, data, run = begin(world, strange=Strange())
    with pytest.raises(tm.SnapshotError) as error:
        train(model, optimizer, data, run)
    assert "at: strange.socket.0" in message(error)
    world.close()


def test_init_and_resume_twice_are_errors(world):
    with pytest.raises(UsageError, match="in its world already"):
        tm.init()
    begin(world)
    with pytest.raises(UsageError, match=r"resume\(\) was called twice"):
        begin(world)


def test_an_evaluation_that_was_left_early_is_not_reported_as_whole(world):
    test = world.evaluation(Ones(10), batch_size=4)
    for x in test:
        test.add(mean=x.mean())
        break
    with pytest.raises(UsageError, match="4 of 10 samples were evaluated"):
        test.result()


def test_adding_to_an_evaluation_outside_its_loop_is_an_error(world):
    test = world.evaluation(Ones(10), batch_size=4)
    with pytest.raises(UsageError, match="outside the loop"):
        test.add(loss=1.0)


def test_a_folder_that_is_a_file_is_one_message(world, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(tm.SnapshotError) as error:
        begin(world, folder="taken")
    assert "the folder of the snapshots can't be" in message(error)
    assert str(tmp_path / "taken") in message(error)


def test_epochs_without_a_loader_count_only_what_was_counted(world):
    model = world.wrap(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = world.resume(model=model, optimizer=optimizer)
    for _ in run.epochs(2):
        for _step in range(3):
            model(torch.ones(1, 3)).mean().backward()
            optimizer.step()
            run.step()
    assert run.steps_done == 6


@pytest.fixture
def agent(monkeypatch):
    """Let this process be a worker of an agent that holds memory, in this process."""
    held = HeldMemory()
    monkeypatch.setenv("TORCHMUSTER_SOCKET", "/nonexistent/agent")
    monkeypatch.setattr(NodeMemory, "_call", lambda self, ask: held.answer(ask))


def test_memory_without_muster_is_said_and_the_run_goes_on(world, capfd):
    model, optimizer, data, run = begin(world, memory_every_steps=1)
    train(model, optimizer, data, run)
    assert "memory_every_steps is without effect here" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory_every_steps": 0}, "memory_every_steps is 0, below one"),
        ({"memory_every_steps": "x"}, "memory_every_steps is 'x', no whole number"),
        ({"memory_every_steps": 1.5}, "memory_every_steps is 1.5, no whole number"),
        ({"memory_every_steps": True}, "memory_every_steps is True, no whole number"),
        ({"memory_every_steps": 1, "memory_copies": 0}, "memory_copies is 0, below one"),
        ({"memory_copies": 2}, "memory_copies=2 has no effect without memory_every_steps"),
        (
            {"memory_every_steps": 1, "memory_mb_per_s": -3},
            "memory_mb_per_s is -3, no number above zero",
        ),
        (
            {"memory_every_steps": 1, "memory_copies": 2},
            "memory_copies=2: each node's part on as many other nodes, but this run has 1 node",
        ),
    ],
)
def test_counts_of_memory_that_nothing_can_follow_are_refused(world, agent, options, words):
    with pytest.raises(UsageError) as error:
        begin(world, **options)
    assert words in message(error)


@pytest.mark.parametrize("number", [np.int64(2), 2.0], ids=repr)
def test_whole_numbers_of_any_type_are_counts(world, number):
    run = begin(world, every_steps=number, log_every=number)[-1]
    run.close()


def test_too_little_memory_is_said_with_the_sum_before_the_first_step(world, agent, monkeypatch):
    monkeypatch.setattr("torchmuster.train.memory.free_bytes", lambda: 1_000_000)
    with pytest.raises(MisfitError) as error:
        begin(world, model=nn.Linear(3, 100_000), memory_every_steps=1)
    said = message(error)
    assert "node 0 has too little memory for snapshots in memory" in said
    assert (
        "they take 3.052 MiB there (the last whole one and the next),"
        " the training itself takes 1.526 MiB from its first step on, and 976.6 KiB are free"
        in said
    )


def test_an_agent_of_another_version_is_named(world, agent, monkeypatch):
    monkeypatch.setattr(NodeMemory, "_call", lambda self, ask: CallFailed(what="unknown"))
    with pytest.raises(SnapshotError) as error:
        begin(world, memory_every_steps=1)
    said = message(error)
    assert "the agent of this node can't hold snapshots in memory" in said
    assert "an agent of an older torchmuster" in said


def test_a_parameter_that_changes_between_steps_is_said_once_and_copied_at_once_from_then_on(
    world, agent, capfd
):
    model, optimizer, data, run = begin(world, samples=40, memory_every_steps=1)
    slow = run._saves._memory.staging
    original = type(slow).copy

    def copy(self, boxes, file, later=()):
        staged = original(self, boxes, file, later)
        for _, source, _, _ in staged.rest:
            source.add_(1)  # as a script that clamps its weights before the optimizer's step
        return staged

    slow.copy = copy.__get__(slow)
    train(model, optimizer, data, run)
    run.close()
    said = capfd.readouterr().err
    assert said.count("was changed in place while it was copied, and not by optimizer.step()") == 1
    assert {f.part.step for f in run._saves._memory._memory.all() if f.part} >= {9}


def refused(call, *words):
    with pytest.raises(UsageError) as error:
        call()
    assert all(word in str(error.value) + (error.value.fix or "") for word in words), error.value


def test_what_is_no_model_or_is_wrapped_already_is_not_wrapped(world):
    refused(lambda: world.wrap(nn.Linear), "the class Linear", "tm.wrap(Linear())")
    refused(lambda: world.wrap([nn.Linear(3, 1)]), "tm.wrap got list")
    model = world.wrap(nn.Linear(3, 1))
    refused(lambda: world.wrap(model), "wrapped already")


def test_an_optimizer_of_another_model_is_refused(world):
    model = world.wrap(nn.Linear(3, 1))
    other = torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)
    refused(lambda: world.resume(model=model, optimizer=other), "no parameter of the model")
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    world.resume(model=model, optimizer=own, other=other, folder="snapshots")  # one trains it


def test_an_optimizer_that_no_snapshot_would_have_is_refused_at_its_first_step(world):
    model = world.wrap(nn.Linear(3, 1))
    adam = torch.optim.Adam(model.parameters())
    stateless = torch.optim.SGD(model.parameters(), lr=0.1)
    elsewhere = torch.optim.Adam(nn.Linear(3, 1).parameters())
    schedule = torch.optim.lr_scheduler.StepLR(adam, 1)
    world.resume(model=model, schedule=schedule, folder="snapshots")
    model(torch.ones(2, 3)).mean().backward()
    elsewhere.param_groups[0]["params"][0].grad = torch.ones(1, 3)
    for optimizer in (stateless, elsewhere):
        optimizer.step()
    refused(adam.step, "no snapshot would have its state", "optimizer=...) with this Adam")


def test_an_optimizer_in_an_object_that_saves_it_is_not_refused(world):
    class Wrapper:
        def __init__(self, inner):
            self.inner = inner

        def state_dict(self):
            return self.inner.state_dict()

        def load_state_dict(self, state):
            self.inner.load_state_dict(state)

    model = world.wrap(nn.Linear(3, 1))
    adam, other = (torch.optim.Adam(model.parameters()) for _ in range(2))
    world.resume(model=model, mine=Wrapper(adam), folder="snapshots")
    model(torch.ones(2, 3)).mean().backward()
    adam.step()
    world.close()
    other.step()  # nobody looks once the world has gone


def test_a_loader_of_torch_is_no_loader_of_the_run(world):
    loader = torch.utils.data.DataLoader(Ones(8), batch_size=2)
    model = world.wrap(nn.Linear(3, 1))
    refused(lambda: world.resume(model=model, data=loader), "DataLoader", "tm.loader(dataset")
    refused(lambda: world.loader(loader, batch_size=2), "takes a dataset")
    sampler = torch.utils.data.SequentialSampler(Ones(8))
    refused(
        lambda: world.loader(Ones(8), batch_size=2, sampler=sampler), "`sampler`", "leave it out"
    )


def test_a_second_epoch_outside_of_the_runs_epochs_is_refused(world, tmp_path):
    _, _, data, _ = begin(world, folder=str(tmp_path))
    for _ in data:
        break

    def loop():
        for _ in range(2):
            for _x in data:
                pass

    with pytest.raises(UsageError) as error:
        loop()
    assert error.value.fix.startswith(("for epoch in run.epochs(N)", "call optimizer.step()"))


def test_a_model_that_is_called_without_its_wrapper_is_found_at_the_first_step(world, tmp_path):
    model = nn.Linear(3, 1)
    WeightedDDP(model, world.step_state)  # as with several workers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.resume(model=model, optimizer=optimizer, folder=str(tmp_path))
    model(torch.ones(3)).mean().backward()
    refused(optimizer.step, "never called", "call what tm.wrap returned")
