from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.node.output import LogVoice


def test_a_voice_without_terminal_speaks_into_its_log(tmp_path):
    disk = DiskWriter()
    disk.start()
    path = tmp_path / "agents" / "n1.log"
    voice = LogVoice(str(path), disk)

    voice.say("joined")
    voice.show(0, 1, "the rank has a log of its own\n", 0)
    voice.print("error: x\n")
    voice.flush(30.0)

    assert path.read_text() == "muster: joined\nerror: x\n"
