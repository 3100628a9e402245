"""The DNS of a cluster, as far as pods of a run need it: the names of Services and of the pods behind headless ones.

    python names.py ADDRESS SERVER CA CERTIFICATE KEY HIDDEN

Each question is put to the API server, so an answer is never old. The labels in the file HIDDEN, one a line, have no
record yet: so a test makes a name late.
"""

import contextlib
import http.client
import ipaddress
import json
import socketserver
import ssl
import struct
import sys
import threading
from pathlib import Path

ZONE = ["svc", "cluster", "local"]
TTL_S = 1
TYPE_A, NO_ERROR, SERVER_FAILED, NO_SUCH_NAME = 1, 0, 2, 3


class Api(threading.local):
    """The API server, over a connection of each thread."""

    def __init__(self, server, context):
        self._server, self._context, self._connection = server, context, None

    def get(self, path):
        """Return an object or a list; None where there is none.

        Raises:
            OSError: The server does not answer.
        """
        if self._connection is None:
            host, _, port = self._server.partition(":")
            self._connection = http.client.HTTPSConnection(
                host, int(port), context=self._context, timeout=5
            )
        try:
            self._connection.request("GET", path)
            answer = self._connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection = None
            raise OSError(str(error)) from error
        return json.loads(text) if answer.status == 200 else None


def addresses(api, labels):
    """Return the addresses of a name of the zone, given as its labels in front of it; None where there is no such name."""
    if not 2 <= len(labels) <= 3:
        return None
    *host, service, namespace = labels
    found = api.get(f"/api/v1/namespaces/{namespace}/services/{service}")
    if found is None:
        return None
    if (address := found["spec"].get("clusterIP")) != "None":
        return None if host or not address else [address]
    place = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    slices = api.get(f"{place}?labelSelector=kubernetes.io/service-name%3D{service}")
    ends = [one for part in (slices or {}).get("items", []) for one in part["endpoints"] or []]
    known = [
        address
        for one in ends
        if one["conditions"].get("ready") and (not host or one.get("hostname") == host[0])
        for address in one["addresses"]
    ]
    return known or None


def answer(question, api, hidden):
    """Return the answer to one datagram."""
    (number,) = struct.unpack("!H", question[:2])
    labels, at = [], 12
    while size := question[at]:
        labels.append(question[at + 1 : at + 1 + size].decode(errors="replace").lower())
        at += 1 + size
    (kind,) = struct.unpack("!H", question[at + 1 : at + 3])
    code, found = NO_ERROR, []
    try:
        inside = labels[-3:] == ZONE and not set(labels) & hidden
        known = addresses(api, labels[:-3]) if inside else None
        code = NO_SUCH_NAME if known is None else NO_ERROR
        found = known if known is not None and kind == TYPE_A else []
    except OSError:
        code = SERVER_FAILED
    head = struct.pack("!HHHHHH", number, 0x8580 | code, 1, len(found), 0, 0)
    records = b"".join(
        struct.pack("!HHHIH", 0xC00C, TYPE_A, 1, TTL_S, 4) + ipaddress.ip_address(one).packed
        for one in found
    )
    return head + question[12 : at + 5] + records


def main():
    address, server, authority, certificate, key, hidden_names = sys.argv[1:]
    path = Path(hidden_names)
    context = ssl.create_default_context(cafile=authority)
    context.load_cert_chain(certificate, key)
    api = Api(server, context)

    class Question(socketserver.BaseRequestHandler):
        def handle(self):
            data, socket = self.request
            with contextlib.suppress(IndexError, struct.error):
                hidden = set(path.read_text().split()) if path.exists() else set()
                socket.sendto(answer(data, api, hidden), self.client_address)

    socketserver.ThreadingUDPServer.daemon_threads = True
    socketserver.ThreadingUDPServer((address, 53), Question).serve_forever()


if __name__ == "__main__":
    main()
