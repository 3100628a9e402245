"""A small editor: speaks the Debug Adapter Protocol with a debugger at a port.

Source: microsoft.github.io/debug-adapter-protocol, specification.
"""

import json
import socket


class Editor:
    """One session; `with` ends it."""

    def __init__(self, port, limit_s=60.0):
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=limit_s)
        self._stream = self._socket.makefile("rwb")
        self._number = 0
        self._answers = {}
        self.events = []

    def __enter__(self):
        return self

    def __exit__(self, *reason):
        self._stream.close()
        self._socket.close()

    def ask(self, command, **arguments):
        """Send a request and return the body of its answer; an error of the other side is one here."""
        number = self.send(command, **arguments)
        return self.answer_to(number)

    def send(self, command, **arguments):
        """Send a request; return its number."""
        self._number += 1
        request = {"seq": self._number, "type": "request", "command": command}
        data = json.dumps({**request, "arguments": arguments}).encode()
        self._stream.write(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
        self._stream.flush()
        return self._number

    def answer_to(self, number):
        """Return the body of the answer to a request; keep the events that come before."""
        while number not in self._answers:
            self._receive()
        answer = self._answers.pop(number)
        assert answer["success"], answer
        return answer.get("body", {})

    def wait_for(self, event):
        """Return the body of the next event of this name."""
        while True:
            for index, found in enumerate(self.events):
                if found["event"] == event:
                    del self.events[: index + 1]
                    return found.get("body", {})
            self._receive()

    def _receive(self):
        length = 0
        while (line := self._stream.readline()) != b"\r\n":
            if not line:
                raise EOFError("the debugger has hung up")
            name, _, value = line.decode().partition(":")
            length = int(value) if name == "Content-Length" else length
        message = json.loads(self._stream.read(length))
        if message["type"] == "event":
            self.events.append(message)
        elif message["type"] == "response":
            self._answers[message["request_seq"]] = message

    def attach(self, path_mappings, breakpoints):
        """Attach as VS Code does: breakpoints are {file: [line, ...]} in the names of this side."""
        self.ask("initialize", clientID="test", adapterID="debugpy", pathFormat="path")
        attaching = self.send("attach", pathMappings=path_mappings, justMyCode=True)
        self.wait_for("initialized")
        for path, lines in breakpoints.items():
            wanted = [{"line": line} for line in lines]
            self.ask("setBreakpoints", source={"path": str(path)}, breakpoints=wanted)
        self.ask("configurationDone")
        self.answer_to(attaching)
