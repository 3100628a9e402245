"""What a worker reports of its own end: as much as fits, whatever its exception is."""

import asyncio
import hashlib
import importlib
import os
import sys

import pytest

from torchmuster.core.model.codec import encode
from torchmuster.core.net import ipc
from torchmuster.core.node.setup import make_socket_folder
from torchmuster.core.node.spawner import last_words
from torchmuster.core.node.spawner.last_words import CodeNote

DEADLINE_S = 30.0


def heard_while(call):
    """Return what an agent heard while `call(path)` ran in a thread."""
    heard = []
    path = os.path.join(make_socket_folder(), "agent.sock")

    async def take(call):
        heard.append(call.request)
        await call.reply(ipc.CallTaken())

    async def serve():
        agent = ipc.IpcServer(path, lambda: {os.getpid()}, ipc.WorkerReport, take)
        await agent.open()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.to_thread(call, path)
        agent.close()

    asyncio.run(serve())
    (report,) = heard
    return report


def report_of(error):
    def fail():
        raise error

    def call(path):
        try:
            fail()
        except type(error) as raised:
            last_words.report(path, raised, CodeNote(None))

    return heard_while(call).error


def test_an_exit_within_an_except_is_reported_with_what_was_handled():
    error = SystemExit(1)
    error.__context__ = ValueError("bad batch\nof 3")
    report = report_of(error)

    assert (report.type_name, report.handled) == ("SystemExit", "ValueError: bad batch")
    assert report_of(ValueError("x")).handled is None
    assert report_of(SystemExit(1)).handled is None


def test_an_exception_is_reported_with_type_message_and_line():
    report = report_of(ValueError("bad batch"))

    assert report.type_name == "ValueError"
    assert report.message == "bad batch"
    assert report.where.startswith(__file__)
    assert report.traceback.endswith("ValueError: bad batch\n")


def test_an_exception_that_says_it_is_final_is_reported_as_final():
    error = ValueError("no good snapshot")
    error.muster_final = True

    assert report_of(error).is_final is True
    assert report_of(ValueError("bad batch")).is_final is False


class Silent(Exception):  # noqa: N818 - as a user may call it
    def __str__(self):
        raise RuntimeError("no words")


def test_an_exception_that_can_t_be_shown_is_reported_by_its_name():
    report = report_of(Silent())

    assert report.type_name.endswith("Silent")
    assert "can't be shown" in report.traceback


@pytest.mark.parametrize("character", ["x", "ü", "数", "🔥", "\0"])
def test_a_giant_message_is_reported_in_part_and_never_lost(character):
    report = report_of(ValueError(character * 200_000))

    assert report.type_name == "ValueError"
    assert report.message == character * 8192
    assert character * 1000 in report.traceback
    assert len(encode(ipc.WorkerFailed(error=report))) <= ipc.MAX_FRAME_BYTES


class Ours(Exception):  # noqa: N818 - as our library's errors: it explains itself
    where = why = fix = "🔥" * 9000

    def explain_to_user(self):
        return self.why


def test_a_giant_error_of_our_own_is_reported_in_part_and_never_lost():
    report = report_of(Ours("🔥" * 9000))

    assert report.type_name == "Ours"
    assert report.message == "🔥" * 8192
    assert "🔥" * 1000 in report.traceback


# Which code a worker says that it has run.


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project that is the current folder, of which rank 0 has imported `the_model_of_this_test`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "the_model_of_this_test.py").write_text("ANSWER = 1\n")
    importlib.import_module("the_model_of_this_test")
    yield tmp_path
    del sys.modules["the_model_of_this_test"]


def shown(note):
    return {file.path: (file.sha256, file.changed) for file in note.read().files}


def checksum(text):
    return hashlib.sha256(text).hexdigest()


def test_the_script_s_own_bytes_and_the_project_s_modules_are_told(project):
    note = CodeNote(str(project))
    note.take_script(str(project / "train.py"), b"import the_model_of_this_test\n")
    (project / "train.py").write_text("changed since\n")
    assert shown(note) == {
        "train.py": (checksum(b"import the_model_of_this_test\n"), False),
        "the_model_of_this_test.py": (checksum(b"ANSWER = 1\n"), False),
    }


def test_a_module_that_changed_while_the_worker_ran_is_marked(project):
    note = CodeNote(None)
    path = project / "the_model_of_this_test.py"
    path.write_text("ANSWER = 2\n")
    later = note._since + 10
    os.utime(path, (later, later))
    assert shown(note) == {path.name: (checksum(b"ANSWER = 2\n"), True)}


def test_their_number_is_bounded_and_the_rest_is_counted(project, monkeypatch):
    monkeypatch.setattr(last_words, "_MOST_FILES", 1)
    note = CodeNote(None)
    note.take_script(str(project / "train.py"), b"")
    code = note.read()
    assert [file.path for file in code.files] == ["train.py"]
    assert code.num_left_out == 1


def test_installed_packages_and_other_ranks_are_no_business_of_it(project, monkeypatch):
    theirs = project / "env/lib/site-packages"
    theirs.mkdir(parents=True)
    (theirs / "an_installed_one.py").write_text("")
    monkeypatch.syspath_prepend(str(theirs))
    importlib.import_module("an_installed_one")
    assert list(shown(CodeNote(None))) == ["the_model_of_this_test.py"]
    del sys.modules["an_installed_one"]
    monkeypatch.setenv("RANK", "1")
    assert CodeNote(None).read() is None
