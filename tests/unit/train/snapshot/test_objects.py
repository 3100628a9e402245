"""The user's objects: what can't be saved or doesn't fit is named, with its shapes; and the copy of them that is saved."""

import pytest
import torch
from torch import nn

from torchmuster.errors import UsageError
from torchmuster.train.objects import Objects
from torchmuster.train.snapshot import writer
from torchmuster.train.snapshot.folder import LocalFolder
from torchmuster.train.snapshot.layout import view_of
from torchmuster.train.snapshot.staging import Staging, whole_boxes
from torchmuster.train.snapshot.state import ChangedError, SnapshotError
from unit.train.snapshot.making import DATA, crew_of, read_newest

pytestmark = pytest.mark.usefixtures("alone")


class Average:
    """A user's own object: a moving average, in values of many types."""

    def __init__(self):
        self.values = {"by step": {0: 1.5, 1: float("inf")}, "shape": (1, 2), "tag": b"x"}

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = state


def make_objects(*, hidden=4, kind=torch.optim.AdamW, **more):
    model = nn.Sequential(nn.Linear(3, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 1))
    optimizer = kind(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "average": Average(), **more}


def train(things, steps=3):
    for _ in range(steps):
        things["model"](torch.randn(5, 3)).square().mean().backward()
        things["optimizer"].step()
        things["optimizer"].zero_grad()


def save(folder, things, step=3):
    state, tensors = Objects(things).pack()
    order = writer.WriteOrder(
        number=0,
        step=step,
        epoch=0,
        kind="whole",
        staged=Staging().copy(whole_boxes(tensors), DATA),
        state=state | {"muster": {}},
        rank_state={},
    )
    writer.write(crew_of(folder), order)


def load(folder, things):
    Objects(things).load(read_newest(folder, pytest.fail), folder)


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a snapshot of step 3 of the objects of `make_objects()`."""
    made = LocalFolder(str(tmp_path))
    things = make_objects()
    train(things)
    save(made, things)
    return made


def test_a_loaded_training_goes_on_bit_for_bit(tmp_path):
    folder = LocalFolder(str(tmp_path))
    old, new = make_objects(), make_objects()
    train(old)
    old["average"].values["seen"] = {3}
    save(folder, old)
    load(folder, new)
    assert new["average"].values == old["average"].values
    for things in (old, new):
        torch.manual_seed(5)
        train(things)
    for a, b in zip(old["model"].parameters(), new["model"].parameters(), strict=True):
        assert torch.equal(a, b)


def test_later_steps_do_not_change_what_was_staged(tmp_path):
    things = make_objects()
    _, tensors = Objects(things).pack()
    staged = Staging().copy(whole_boxes(tensors), DATA)
    before = staged.data.clone()
    train(things)
    assert torch.equal(staged.data, before)


def test_an_optimizer_that_has_not_stepped_is_saved_as_it_is(tmp_path):
    folder = LocalFolder(str(tmp_path))
    save(folder, make_objects())
    fresh = make_objects()
    train(fresh)
    load(folder, fresh)
    assert not fresh["optimizer"].state


def test_another_model_names_the_tensors_and_their_shapes(folder):
    with pytest.raises(SnapshotError, match="is that of another model: 7 tensors differ") as caught:
        load(folder, make_objects(hidden=6))
    assert "model.0.weight: [4, 3] in the snapshot, [6, 3] in the script" in caught.value.why
    assert "model.2.weight: [1, 4] in the snapshot, [1, 6] in the script" in caught.value.why
    assert "start over with another folder" in caught.value.fix


def test_layers_that_came_or_went_are_named(folder):
    things = make_objects()
    things["model"].append(nn.Linear(1, 1))
    with pytest.raises(SnapshotError, match="2 tensors differ") as caught:
        load(folder, things)
    assert "model.3.weight: not in the snapshot" in caught.value.why
    things["model"] = things["model"][:2]
    with pytest.raises(SnapshotError, match="2 tensors differ") as caught:
        load(folder, things)
    assert "model.2.bias: not in the script" in caught.value.why


def test_other_names_than_the_scripts_are_named(folder):
    things = make_objects(scaler=Average())
    del things["average"]
    with pytest.raises(SnapshotError, match="other objects than the script") as caught:
        load(folder, things)
    assert caught.value.why == ("`average` is in the snapshot only; `scaler` is in the script only")


def test_an_object_that_does_not_take_its_state_is_named(folder):
    class Fussy(Average):
        def load_state_dict(self, state):
            raise IndexError("no such slot")

    with pytest.raises(SnapshotError, match="`average` can't load the snapshot of step 3"):
        load(folder, make_objects() | {"average": Fussy()})


def test_another_optimizers_groups_are_refused(folder):
    things = make_objects()
    things["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(SnapshotError, match="`optimizer` can't load the snapshot"):
        load(folder, things)


def test_a_value_that_can_not_be_saved_is_named_by_its_path(folder):
    average = Average()
    average.values["function"] = {"list": [print]}
    with pytest.raises(SnapshotError, match="can't be saved") as caught:
        Objects({"average": average}).pack()
    assert caught.value.where == "average.function.list.0"


def test_an_object_without_state_dict_is_refused():
    with pytest.raises(
        UsageError, match="`history` can't be saved: its type list has no state_dict"
    ):
        Objects({"history": []}).check()


def test_a_misspelt_option_is_no_object():
    with pytest.raises(UsageError, match="`save_every_steps` can't be saved") as caught:
        Objects({"save_every_steps": 2}).check(["every_steps", "keep"])
    assert caught.value.fix == "did you mean `every_steps`?"


def test_the_runs_own_name_is_refused():
    with pytest.raises(UsageError, match="the name `muster` is reserved for the run"):
        Objects({"muster": Average()}).check()


def test_every_dtype_that_torch_trains_with_keeps_its_bits(tmp_path):
    folder = LocalFolder(str(tmp_path))
    names = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 float8_e4m3fn"
    dtypes = [getattr(torch, name) for name in (*names.split(), "complex64", "complex128")]
    values = {str(dtype): torch.arange(7).to(torch.float32).to(dtype) for dtype in dtypes}
    values |= {"none": torch.empty(0, 3), "one": torch.tensor(3.5), "t": torch.ones(3, 2).t()}
    old, new = Average(), Average()
    old.values = values
    save(folder, {"average": old})
    load(folder, {"average": new})
    for name, tensor in values.items():
        assert new.values[name].dtype == tensor.dtype
        assert new.values[name].shape == tensor.shape
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        assert torch.equal(new.values[name].contiguous().view(-1).view(torch.uint8), raw)


# A copy whose rest is made in the background: equal to the state when it was ordered, or refused.


@pytest.fixture
def staged():
    tensors = {"model.w": torch.arange(6.0), "model.mean": torch.ones(3)}
    made = Staging().copy(whole_boxes(tensors), "data-00000.bin", later={"model.w"})
    return tensors, made


def values(staged, path):
    (chunk,) = staged.tensors[path].chunks
    return view_of(staged.data, chunk, torch.float32)


def test_what_is_not_left_for_later_is_copied_at_once(staged):
    tensors, made = staged
    tensors["model.mean"].add_(1)
    made.finish()
    assert torch.equal(values(made, "model.mean"), torch.ones(3))
    assert torch.equal(values(made, "model.w"), torch.arange(6.0))


@pytest.mark.parametrize("change", [lambda t: t.mul_(2), lambda t: t.detach().add_(1)], ids=str)
def test_a_tensor_that_changes_before_it_is_copied_is_refused(staged, change):
    tensors, made = staged
    change(tensors["model.w"])
    with pytest.raises(ChangedError, match="was changed"):
        made.finish()


def test_only_what_an_optimizer_steps_may_be_copied_later():
    model, average = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    model.register_buffer("mean", torch.zeros(2))
    model.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    optimizer = torch.optim.AdamW([model.weight, model.bias])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    objects = Objects({"model": model, "average": average, "optimizer": optimizer})
    later = objects.stepped()
    _, tensors = objects.pack()
    assert {path for path in tensors if path not in later} == {
        *("model.mean", "model.frozen", "average.weight", "average.bias")
    }
    assert "optimizer.state.0.exp_avg" in tensors


def test_what_optimizers_will_make_is_foreseen():
    model = torch.nn.Linear(100, 10, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    objects = Objects({"model": model, "optimizer": optimizer})
    foreseen = objects.expected_bytes()
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    _, tensors = objects.pack()
    assert foreseen == pytest.approx(sum(t.nbytes for t in tensors.values()), rel=0.01)
