"""What a test does where a program or a right that it needs is not there."""

import os
from typing import NoReturn

import pytest


def stop(reason: str) -> NoReturn:
    """Skip the test, but fail it in CI's `make test-all`, which has installed all that the tests need.

    `make test` installs nothing, so there a missing program is no failure, in CI either.
    """
    must_be_there = os.environ.get("CI") == "true" and os.environ.get("MUSTER_TESTS") == "all"
    (pytest.fail if must_be_there else pytest.skip)(reason)
