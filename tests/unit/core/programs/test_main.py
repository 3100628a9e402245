import socket

import pytest

from torchmuster.core.files.layout import RunDir
from torchmuster.core.programs.head_host import StorePorts
from torchmuster.core.programs.main import job_environment, machines_left_out


def test_the_port_of_a_store_takes_callers_before_the_store_has_begun():
    desk = StorePorts()
    port = desk.open(3, "127.0.0.1")

    with socket.create_connection(("127.0.0.1", port)) as caller, desk.take(3) as listening:
        accepted, address = listening.accept()
        with accepted:
            assert address == caller.getsockname()


def test_the_socket_of_an_attempt_is_given_once():
    desk = StorePorts()
    desk.open(0, "127.0.0.1")

    desk.take(0).close()
    assert desk.take(0) is None
    assert desk.take(1) is None


def test_two_attempts_never_share_a_port():
    desk = StorePorts()
    ports = {desk.open(attempt, "127.0.0.1") for attempt in range(8)}

    assert len(ports) == 8
    for attempt in range(8):
        desk.take(attempt).close()


def test_an_address_that_is_not_ours_is_an_error():
    with pytest.raises(OSError, match="assign"):
        StorePorts().open(0, "192.0.2.1")


def test_machines_that_computed_wrongly_are_known_to_the_next_head(tmp_path):
    run_dir = RunDir(str(tmp_path))
    assert machines_left_out(run_dir) == frozenset()
    lines = [
        '{"time":"t","event":"run_started"}',
        '{"time":"t","event":"node_left_out","node":"n2","rank":1,"machine":"gpu07"}',
        '{"time":"t","event":"node_left_out","node":"n3","rank":2}',
        '{"time":"t","event":"node_left_out","no',
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    assert machines_left_out(run_dir) == {"gpu07"}


@pytest.mark.parametrize(
    ("num_workers", "given", "expected"), [(1, None, None), (2, None, "1"), (2, "8", "8")]
)
def test_several_workers_on_a_node_get_one_thread_each_as_under_torchrun(
    monkeypatch, num_workers, given, expected
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)

    assert job_environment(num_workers).get("OMP_NUM_THREADS") == expected
