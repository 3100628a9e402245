import datetime as dt
import json

from hypothesis import given

from torchmuster.workflow.spec.sandbox import pack, unpack
from unit.strategies import JSON_VALUES


@given(JSON_VALUES)
def test_values_survive_the_way_through_json(value):
    assert unpack(json.loads(json.dumps(pack(value)))) == value


def test_keys_that_are_no_text_stay_what_they_are():
    value = {1: "a", 2.5: ["b"], None: {}}
    assert unpack(json.loads(json.dumps(pack(value)))) == value


def test_a_date_travels_as_text():
    assert pack(dt.date(2024, 1, 2)) == "2024-01-02"
