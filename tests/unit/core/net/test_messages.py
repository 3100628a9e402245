import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchmuster.core import plugs
from torchmuster.core.model.codec import CodecError
from torchmuster.core.net import messages
from unit.strategies import JSON_VALUES

list(plugs.every("messages"))  # of all rooms that are here
NAMES = sorted(messages.Message.words)


@given(st.binary() | st.text().map(str.encode))
@example(b"[" * 100_000)
@example(b'{"type":"Ping","number":' + b"9" * 5000 + b"}")
@example(b"\xff\xfe\x00")
@example(b"")
def test_no_bytes_make_the_parser_fail_in_another_way(payload):
    with pytest.raises(CodecError):
        messages.decode(payload)


@given(
    JSON_VALUES
    | st.fixed_dictionaries(
        {"type": st.sampled_from(NAMES) | JSON_VALUES},
        optional=dict.fromkeys(("number", "place", "end", "text", "attempt"), JSON_VALUES),
    )
)
@example({"type": "WorkerEnded", "end": {"elapsed_s": 10**400}})
@example({"type": "Message"})
@example({"type": []})
@example({"type": "Ping", "number": True})
def test_no_json_makes_the_parser_fail_in_another_way(value):
    try:
        message = messages.decode(json.dumps(value).encode())
    except CodecError:
        return
    assert type(message).__name__ == value["type"]


def test_each_message_has_its_name_alone_and_base_classes_are_none():
    modules = [messages, *plugs.every("messages")]
    for name, cls in messages.Message.words.items():
        assert [vars(module)[name] for module in modules if cls.__module__ == module.__name__] == [
            cls
        ]
    assert not {"Message", "AnyOutput", "AnyWelcome", "CheckAnswer"} & set(NAMES)
