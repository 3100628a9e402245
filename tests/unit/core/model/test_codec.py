import dataclasses
import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.values import run_plan, worker_end
from torchmuster.core import plugs
from torchmuster.core.model import codec
from torchmuster.core.model.failure import EndKind, WorkerEnd
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.verdict import Result
from torchmuster.core.net import messages
from torchmuster.errors import UsageError
from unit.strategies import JSON_VALUES, instances

list(plugs.every("messages"))  # of all rooms that are here
MESSAGE_CLASSES = list(messages.Message.words.values())
PLAN = run_plan(args=("-x",), max_nodes=2, workers_per_node=(4, 2))


@pytest.mark.parametrize("cls", MESSAGE_CLASSES, ids=lambda cls: cls.__name__)
def test_every_message_survives_the_wire(cls):
    @given(instances(cls))
    def check(message):
        assert messages.decode(messages.encode(message)) == message

    check()


@pytest.mark.parametrize("cls", [RunPlan, Result, WorkerEnd], ids=lambda cls: cls.__name__)
def test_every_file_of_a_run_survives_json(cls):
    @given(instances(cls))
    def check(value):
        assert codec.from_plain(cls, json.loads(json.dumps(codec.to_plain(value)))) == value

    check()


def test_absent_fields_take_their_defaults():
    plain = {name: value for name, value in codec.to_plain(PLAN).items() if name != "tee"}

    assert codec.from_plain(RunPlan, plain) == PLAN


@pytest.mark.parametrize("name", ["run_id", "program", "min_nodes"])
def test_a_missing_field_is_refused_by_name(name):
    plain = codec.to_plain(PLAN)
    del plain[name]

    with pytest.raises(codec.CodecError, match=f"field {name} is missing"):
        codec.from_plain(RunPlan, plain)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("run_id", 1, "run_id: expected str, got int"),
        ("run_id", None, "run_id: expected str, got NoneType"),
        ("min_nodes", "1", "min_nodes: expected int, got str"),
        ("min_nodes", True, "min_nodes: expected int, got bool"),
        ("min_nodes", 1.0, "min_nodes: expected int, got float"),
        ("grow", 1, "grow: expected bool, got int"),
        ("workers_per_node", 4, "workers_per_node: expected a list"),
        ("workers_per_node", [4, "2"], r"workers_per_node\[1\]: expected int, got str"),
        ("program", [], "program: expected an object"),
        ("tee", "some", "tee: unknown word 'some'"),
        ("tee", [], "tee: unknown word"),
        ("stdin_rank", "0", "stdin_rank: expected int, got str"),
        ("limits", {"grace_s": "3"}, "limits.grace_s: expected float, got str"),
        ("limits", {"grace_s": 10**400}, "limits.grace_s: "),
        ("evil", 1, "unknown field evil"),
        ("program", {**codec.to_plain(PLAN.program), "evil": 1}, "program: unknown field evil"),
    ],
)
def test_a_field_of_another_type_or_unknown_is_refused_with_its_path(name, value, complaint):
    with pytest.raises(codec.CodecError, match=complaint):
        codec.from_plain(RunPlan, {**codec.to_plain(PLAN), name: value})


def test_a_whole_number_is_a_number_of_seconds():
    plain = codec.to_plain(PLAN)
    plain["limits"]["grace_s"] = 5

    grace_s = codec.from_plain(RunPlan, plain).limits.grace_s

    assert grace_s == 5.0
    assert type(grace_s) is float


@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_what_is_no_object_is_refused(value):
    with pytest.raises(codec.CodecError, match="expected an object"):
        codec.from_plain(RunPlan, value)


@given(JSON_VALUES | st.fixed_dictionaries(dict.fromkeys(codec.to_plain(PLAN), JSON_VALUES)))
def test_no_json_makes_the_codec_fail_in_another_way(value):
    try:
        plan = codec.from_plain(RunPlan, value)
    except codec.CodecError:
        return
    assert codec.to_plain(plan)["run_id"] == value["run_id"]


def test_enums_travel_as_their_words():
    assert codec.to_plain(worker_end(EndKind.NODE_LOST))["kind"] == "node_lost"


@dataclass(frozen=True)
class Piece:
    path: str
    data: bytes


def test_bytes_travel_as_base64():
    piece = Piece(path="a", data=b"\0\xff")
    plain = codec.to_plain(piece)
    assert plain["data"] == "AP8="
    assert codec.from_plain(Piece, plain) == piece
    with pytest.raises(codec.CodecError, match="data: expected base64"):
        codec.from_plain(Piece, {**plain, "data": "A"})


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    run_dir: str
    place: int
    head: tuple[str, ...] = ()
    fd: int | None = None
    tty: bool = False
    command: tuple[str, ...] = ()


FULL = CommandLine(
    run_dir="/a=b c", place=0, head=("n1:1", "n2:2"), fd=3, tty=True, command=("x", "--")
)


@pytest.mark.parametrize(
    "order", [FULL, CommandLine(run_dir="", place=-1), CommandLine(run_dir="7", place=7)]
)
def test_a_value_comes_back_from_its_words_and_from_one(order):
    assert codec.from_arguments(CommandLine, codec.to_arguments(order)) == order
    assert codec.from_word(CommandLine, [codec.to_word(order)]) == order


def test_only_what_says_something_is_written():
    least = ["--run-dir=/r", "--place=0", "--"]
    full = ["--head=n1:1", "--head=n2:2", "--fd=3", "--tty", "--", "x", "--"]
    assert codec.to_arguments(CommandLine(run_dir="/r", place=0)) == least
    assert codec.to_arguments(FULL)[2:] == full


@pytest.mark.parametrize(
    "words", [[], ["{}"], ["{", "}"], ["no json"], ['{"run_dir": 1, "place": 1}']]
)
def test_a_word_that_is_not_of_the_value_is_refused(words):
    with pytest.raises(UsageError, match="does not understand how it was started"):
        codec.from_word(CommandLine, words)


def test_words_of_an_earlier_version_are_understood():
    words = ["/r", "--place", "3", "--fd", "7", "--tty", "--", "x"]
    order = CommandLine(run_dir="/r", place=3, fd=7, tty=True, command=("x",))
    assert codec.from_arguments(CommandLine, words) == order


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--run-dir=/r"], "field place is missing"),
        (["--run-dir=/r", "--place=one"], "invalid literal"),
        (["--run-dir=/r", "--place"], "place: expected int"),
        (["--run-dir", "--place=1"], "run_dir: expected str"),
        (["--run-dir=/r", "--place=1", "--tty=yes"], "tty: expected bool"),
        (["--run-dir=/r", "--place=1", "x"], "unknown field x"),
    ],
)
def test_words_that_are_not_of_the_value_are_refused(words, why):
    with pytest.raises(UsageError, match="does not understand how it was started") as caught:
        codec.from_arguments(CommandLine, words)
    assert why in caught.value.why


@dataclass(frozen=True)
class Pairs:
    pairs: tuple[tuple[str, float], ...] = ()


def test_a_tuple_of_several_types_keeps_them():
    pairs = Pairs(pairs=(("loss", 1.5), ("step", 2.0)))
    assert codec.from_plain(Pairs, codec.to_plain(pairs)) == pairs


@pytest.mark.parametrize("plain", [[["loss"]], [["loss", 1.0, 2.0]], [[1.0, "loss"]]])
def test_a_tuple_of_another_form_is_refused(plain):
    with pytest.raises(codec.CodecError, match=r"pairs\[0\]"):
        codec.from_plain(Pairs, {"pairs": plain})


# Messages: a word is decoded only in its own vocabulary, strictly, and compares and shows itself as a dataclass does.


class Said(codec.TypedMessage):
    """A vocabulary."""


class Counted(Said):
    """One of its words."""

    number: int
    names: tuple[str, ...] = ()


class Other(codec.TypedMessage):
    """Another vocabulary."""


class Alone(Other):
    """Its word."""


def test_a_word_comes_back_as_it_was():
    message = Counted(number=1, names=("a",))
    assert codec.decode(codec.encode(message), Said) == message
    assert repr(message) == "Counted(number=1, names=('a',))"
    assert dataclasses.replace(message, number=2) != message


@pytest.mark.parametrize(
    "payload",
    [
        b'{"type":"Alone"}',
        b'{"type":"Said"}',
        b'{"type":"Counted"}',
        b'{"type":"Counted","number":"1"}',
        b'{"type":"Counted","number":1,"more":1}',
        b'{"number":1}',
        b"[]",
    ],
)
def test_what_is_no_word_of_the_vocabulary_is_refused(payload):
    with pytest.raises(codec.CodecError):
        codec.decode(payload, Said)
