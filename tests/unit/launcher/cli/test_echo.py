"""What commands print for programs."""

import json

import pytest

from torchmuster.launcher.cli.echo import echo_json


def test_numbers_that_json_has_not_are_words(capsys):
    inf = float("inf")
    plain = {"loss": float("nan"), "eta": [inf, (-inf, 1.5)], "more": {"step": 3, "none": None}}

    echo_json(plain)

    said = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    words = {"loss": "nan", "eta": ["inf", ["-inf", 1.5]], "more": plain["more"]}
    assert said == words
