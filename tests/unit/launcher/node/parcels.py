"""A parcel of an environment for tests, and a node's shelf."""

import contextlib
import os
from dataclasses import replace

from torchmuster.core.model.plan import EnvironmentNeeds, ShippedEnvironment
from torchmuster.launcher.files.environment import FILE, PIECE_BYTES, ParcelFile, ParcelWriter

NOTES = {"links": {}, "texts": [], "binaries": {}, "moves": {"/old": "env"}}


class Packed:
    """A parcel of so many megabytes that can't be compressed."""

    def __init__(self, path, megabytes=4, notes=NOTES):
        self.path = str(path)
        with open(path, "wb") as file, contextlib.closing(ParcelWriter(file)) as writer:
            for number in range(megabytes * 4):
                writer.add(FILE, f"env/f{number}", os.urandom(PIECE_BYTES // 4))
            sha = writer.finish(notes)
        self.needs = EnvironmentNeeds(
            sha=sha,
            machine=os.uname().machine,
            glibc=0,
            python="3.11",
            base="",
            size_bytes=writer.size_bytes,
            num_pieces=writer.num_pieces,
            unpacked_bytes=writer.unpacked_bytes,
            num_files=writer.num_files,
            has_torch=False,
        )
        file = ParcelFile(self.path, sha, writer.num_pieces)
        self.pieces = {-1: file.list_bytes}
        self.pieces |= {index: file.piece(index) for index in range(len(file.pieces))}
        file.close()

    def feed(self, arrival, first=-1, end=None):
        """Give pieces as a session does."""
        for index in range(first, self.needs.num_pieces if end is None else end):
            assert arrival.take(index, self.pieces[index])


def shipped_in(folder, **needs):
    """Return a small environment that all nodes see in a folder."""
    packed = Packed(folder / "environment.parcel", megabytes=1)
    return ShippedEnvironment(archive=packed.path, needs=replace(packed.needs, **needs))
