"""What unit tests share: no process of a test looks only because a command of another one did."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _patient_again():
    yield
    answers = sys.modules.get("torchmuster.launcher.jobs.answers")
    if answers is not None:
        answers._QUESTION_LIMIT.clear()
        answers._SILENT.clear()
