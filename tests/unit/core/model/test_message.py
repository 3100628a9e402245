"""Messages: a word is decoded only in its own vocabulary, strictly, and compares and shows itself as a dataclass does."""

import dataclasses

import pytest

from torchmuster.core.model.codec import CodecError, TypedMessage, decode, encode


class Said(TypedMessage):
    """A vocabulary."""


class Counted(Said):
    """One of its words."""

    number: int
    names: tuple[str, ...] = ()


class Other(TypedMessage):
    """Another vocabulary."""


class Alone(Other):
    """Its word."""


def test_a_word_comes_back_as_it_was():
    message = Counted(number=1, names=("a",))
    assert decode(encode(message), Said) == message
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
    with pytest.raises(CodecError):
        decode(payload, Said)
