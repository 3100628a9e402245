"""How the archive of a run's code gets to the first pod, and stays on a volume for the next run."""

import hashlib
import os
import threading
from dataclasses import replace

import pytest

from torchmuster.errors import MusterError
from torchmuster.kubernetes.firstpod.conduct import wait_for_archive
from torchmuster.kubernetes.node.record import arriving_folder
from unit.kubernetes.pods.conftest import order_of

DATA = b"the code"


@pytest.fixture
def order(tmp_path):
    sha = hashlib.sha256(DATA).hexdigest()
    order = replace(
        order_of(home=str(tmp_path / "home")),
        code_sha=sha,
        code_bytes=len(DATA),
        has_volume=True,
    )
    os.makedirs(order.folder)
    return order


def read(path):
    with open(path, "rb") as file:
        return file.read()


def send_later(path, data=DATA):
    """Play the client: send when the pod says that it waits."""

    def say(text):
        assert "the client sends it" in text

        def send():
            with open(f"{path}.part", "wb") as file:
                file.write(data)
            os.replace(f"{path}.part", path)

        threading.Thread(target=send).start()

    return say


def test_how_far_the_client_is_is_said(order, tmp_path):
    os.makedirs(arriving_folder(order))
    came = os.path.join(arriving_folder(order), "code.tar.gz")
    with open(came, "wb") as file:
        file.write(DATA[:4])
    said = []

    def say(text):
        said.append(text)
        os.replace(came, order.archive)
        with open(order.archive, "wb") as file:
            file.write(DATA)

    wait_for_archive(order, str(tmp_path), 30.0, say)
    assert said == ["waiting for the code: the client sends it: 4 B of 8 B (50 %)"]


def never(text):
    raise AssertionError(text)


def test_what_a_client_has_sent_is_there_for_the_next_run(order, tmp_path):
    wait_for_archive(order, str(tmp_path), 30.0, send_later(order.archive))
    assert read(order.archive) == DATA

    os.unlink(order.archive)  # unpacked
    second = replace(order, run_id="second")
    os.makedirs(second.folder)
    wait_for_archive(second, str(tmp_path), 30.0, never)
    assert read(second.archive) == DATA


def test_without_a_volume_nothing_is_kept(order, tmp_path):
    order = replace(order, has_volume=False)
    wait_for_archive(order, str(tmp_path), 30.0, send_later(order.archive))
    assert not os.path.exists(os.path.join(order.home, "cache"))


def test_other_code_is_not_taken_for_this(order, tmp_path):
    wait_for_archive(order, str(tmp_path), 30.0, send_later(order.archive))
    other = b"changed!"
    changed = replace(order, run_id="second", code_sha=hashlib.sha256(other).hexdigest())
    os.makedirs(changed.folder)
    wait_for_archive(changed, str(tmp_path), 30.0, send_later(changed.archive, other))
    assert read(changed.archive) == other
    assert len(os.listdir(os.path.join(order.home, "cache"))) == 2


def test_a_damaged_one_is_removed_and_said(order, tmp_path):
    wait_for_archive(order, str(tmp_path), 30.0, send_later(order.archive))
    with open(order.kept, "r+b") as file:
        file.write(b"THE")
    second = replace(order, run_id="second")
    os.makedirs(second.folder)
    with pytest.raises(MusterError) as caught:
        wait_for_archive(second, str(tmp_path), 30.0, never)
    assert caught.value.where == order.kept
    assert not os.path.exists(order.kept)


def test_the_newest_stay(order, tmp_path):
    folder = os.path.join(order.home, "cache")
    os.makedirs(folder)
    for number in range(10):
        path = os.path.join(folder, f"code-{number}.tar.gz")
        with open(path, "wb"):
            pass
        os.utime(path, (number, number))
    wait_for_archive(order, str(tmp_path), 30.0, send_later(order.archive))
    left = sorted(os.listdir(folder))
    assert os.path.basename(order.kept) in left
    assert len(left) == 8
    assert "code-0.tar.gz" not in left


def test_code_that_does_not_come_ends_the_run_with_why(order, tmp_path):
    with pytest.raises(MusterError) as caught:
        wait_for_archive(order, str(tmp_path), 0.0, lambda _: None)
    assert caught.value.where == order.archive
