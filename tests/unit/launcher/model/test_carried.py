"""What may travel between a client and its workers; what may not is refused by the name of its variable."""

import functools
import io
import pickle
import socket
import sqlite3
import sys
import threading

import pytest

from torchmuster.launcher.model import carried
from torchmuster.launcher.model.carried import CarryError, Named, pack_value

MIB = 1 << 20


class Config:
    def __init__(self, **values):
        self.__dict__.update(values)


def refused(value, name=""):
    with pytest.raises(CarryError) as told:
        pack_value(value, "the call of `train`", name, 64 * MIB)
    return told.value


def closure(held):
    def train():
        return held

    return train


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (threading.Lock, "a lock"),
        (threading.RLock, "a lock"),
        (socket.socket, "a socket"),
        (lambda: (number for number in ()), "a generator"),
        (lambda: sqlite3.connect(":memory:"), "a connection to a database"),
        (lambda: open(__file__), "an open file"),  # noqa: SIM115 - it is closed below
    ],
)
def test_a_variable_around_a_function_is_named(make, words):
    held = make()
    try:
        error = refused(closure(held))
    finally:
        getattr(held, "close", lambda: None)()

    assert error.what == f"the call of `train` can't travel: `held` is {words}"
    assert error.muster_final
    assert "inside the function" in error.fix


def test_a_client_of_something_is_named_with_its_class_and_what_it_holds():
    client = Config(session=Config(mutex=threading.Lock()), url="http://x")

    assert refused(closure({"s3": client})).what.endswith("`held['s3'].session.mutex` is a lock")


def test_a_client_that_a_pickle_would_take_is_refused_by_the_name_of_its_package():
    requests = pytest.importorskip("requests")

    class OwnSession(requests.Session):
        pass

    error = refused(closure({"web": OwnSession()}))

    assert error.what.endswith("`held['web']` is an HTTP session of `requests`")
    assert "login" in error.why
    assert pack_value(requests.Response(), "x", "x", MIB)  # data of the same package


def test_connections_to_databases_and_to_object_stores_are_refused():
    sqlalchemy = pytest.importorskip("sqlalchemy")
    boto3 = pytest.importorskip("boto3")
    s3 = boto3.client("s3", region_name="x", aws_access_key_id="a", aws_secret_access_key="b")

    error = refused(closure(sqlalchemy.create_engine("sqlite://")))
    assert error.what.endswith("`held` is a connection to a database of `sqlalchemy`")
    assert refused(closure(s3)).what.endswith("`held` is a client of `botocore`")
    assert pack_value(sqlalchemy.MetaData(), "x", "x", MIB)


@pytest.mark.parametrize("root", sorted(carried._CLIENTS))
def test_every_package_of_the_list_is_known_by_the_names_of_its_classes(root):
    names, words = carried._CLIENTS[root]
    for name in names:
        made = type(name, (), {"__module__": f"{root}.inner", "__qualname__": name})
        assert carried._client_of(made) == f"{words} of `{root}`"
    other = type("Answer", (), {"__module__": f"{root}.inner", "__qualname__": "Answer"})
    assert carried._client_of(other) is None


def test_arguments_and_defaults_and_partials_are_named():
    lock = threading.Lock()

    def train(x=lock):
        return x

    assert "`x` is a lock" in refused(train).what
    given = Named((len, (1, lock), {}), {"": len, "args[0]": 1, "args[1]": lock})
    assert "`args[1]` is a lock" in refused(given).what
    assert "`model` is a lock" in refused(functools.partial(closure(1), model=lock)).what


def test_a_tensor_of_a_device_is_refused_and_one_of_the_cpu_is_not():
    torch = pytest.importorskip("torch")

    class OnGpu(torch.Tensor):
        device = property(lambda _: torch.device("cuda:1"))

    error = refused({"loss": torch.zeros(2).as_subclass(OnGpu)}, "value")

    assert error.what.endswith("`value['loss']` is a tensor on cuda:1")
    assert ".cpu()" in error.fix
    assert torch.equal(pickle.loads(pack_value(torch.ones(2), "x", "x", MIB)), torch.ones(2))
    assert pack_value(torch.empty(2, device="meta"), "x", "x", MIB)


def test_standard_streams_and_files_in_memory_are_no_open_files():
    assert pack_value([sys.stdout, io.BytesIO(b"x")], "x", "x", MIB)


def test_too_large_is_said_with_the_largest_part():
    value = {"small": b"x", "weights": b"x" * (2 * MIB)}

    with pytest.raises(CarryError) as told:
        pack_value(value, "what `train` returned", "value", MIB)

    assert told.value.what == "what `train` returned is larger than 1 MiB"
    assert told.value.where == "`value['weights']`"


def test_a_pickle_grows_no_larger_than_its_limit():
    taken = []

    class Part:
        def __reduce__(self):
            taken.append(1)
            return (bytes, (b"x" * 100_000,))

    with pytest.raises(CarryError):
        pack_value([Part() for _ in range(1000)], "it", "value", MIB)

    # Once up to the limit, and once each to tell which is the largest.
    assert len(taken) < 50 + 1001 * 2
