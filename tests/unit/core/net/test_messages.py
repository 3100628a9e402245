import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchmuster.core.model.codec import CodecError
from torchmuster.core.net import messages
from unit.strategies import JSON_VALUES

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


def test_the_message_types_are_those_of_the_module():
    assert all(getattr(messages, name) is cls for name, cls in messages.Message.words.items())
    assert "Message" not in NAMES
