"""Numbers as people read them."""

import pytest

from torchmuster.launcher.model.events import significant


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (23.4, "23"),
        (1.84, "1.8"),
        (0.05, "0.05"),
        (0.0523, "0.052"),
        (118.0, "120"),
        (9.96, "10"),
        (1.0, "1"),
        (0.996, "1"),
        (0.0, "0"),
    ],
)
def test_a_number_has_two_significant_digits(number, text):
    assert significant(number) == text
