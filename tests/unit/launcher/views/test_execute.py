"""The client's side of `muster exec`: what it makes of the codes."""

from torchmuster.launcher.views.execute import ExecResult


def test_the_highest_code_is_the_code_of_all():
    assert ExecResult(codes={"a": 0, "b": 3, "c": 1}).exit_code == 3
