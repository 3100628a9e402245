import subprocess
import sys

READ_ONE = """
import sys
from torchmuster.core.net import messages

PARTS = "torchmuster.launcher.net.part_messages"
messages.decode(b'{"type":"Ping","number":1}')
assert PARTS not in sys.modules, "the core's own messages need no other room"
print(messages.decode(b'{"type":"AskStacks","ask_id":"one"}').ask_id, PARTS in sys.modules)
"""


def test_a_part_s_messages_are_imported_when_the_first_one_arrives():
    done = subprocess.run([sys.executable, "-c", READ_ONE], capture_output=True, text=True)
    assert done.stdout == "one True\n", done.stderr
