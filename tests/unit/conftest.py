"""What unit tests share: coroutines as tests, and no process of one looks only because a command of another one did."""

import inspect
import sys

import pytest

from kit.waiting import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    run(pyfuncitem.obj(**given))
    return True


@pytest.fixture(autouse=True)
def _patient_again():
    yield
    answers = sys.modules.get("torchmuster.launcher.jobs.answers")
    if answers is not None:
        answers._QUESTION_LIMIT.clear()
        answers._SILENT.clear()
