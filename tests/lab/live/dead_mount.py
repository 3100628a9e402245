"""A file system of its own kind (FUSE) that stops answering, or answers with an error; a script that faults start.

    python dead_mount.py FOLDER ERRNO      0: it takes the mount and then never answers anything

It says `mounted` once it is there. When it is killed, whoever uses FOLDER gets ENOTCONN, as with a network file
system whose client has died.
"""

import ctypes
import errno
import os
import stat
import struct
import sys

INIT, GETATTR, FORGET, BATCH_FORGET, DESTROY, STATFS = 26, 3, 2, 42, 38, 17
HEADER = struct.Struct("<IIQQIIII")  # length, operation, number, node, uid, gid, pid, padding
ANSWER = struct.Struct("<IiQ")
PROTOCOL = struct.Struct("<IIIIHHIIHHI7I")
ROOT = struct.Struct("<QII6Q10I")
BLOCKS = struct.Struct("<5Q10I")


def mount(folder):
    """Mount FOLDER and return the descriptor that the kernel asks through."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"dead", os.fsencode(folder), b"fuse.dead", 0, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return device


def ask(device):
    """Return the next question's operation and number."""
    while True:
        try:
            _, operation, number, *_ = HEADER.unpack_from(os.read(device, 1 << 18))
            return operation, number
        except InterruptedError:
            continue


def answer(device, number, body=b"", error=0):
    os.write(device, ANSWER.pack(ANSWER.size + len(body), -error, number) + body)


def serve(device, error):
    """Answer what concerns the root; everything else with the error."""
    root = ROOT.pack(60, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, stat.S_IFDIR | 0o755, 2, 0, 0, 0, 4096, 0)
    while True:
        operation, number = ask(device)
        if operation == DESTROY:
            return
        if operation == GETATTR:
            answer(device, number, root)
        elif operation == STATFS:
            answer(
                device,
                number,
                BLOCKS.pack(1 << 30, 1 << 29, 1 << 29, 1 << 20, 1 << 19, 4096, 255, 4096, *[0] * 7),
            )
        elif operation not in (FORGET, BATCH_FORGET):
            answer(device, number, error=error)


def main():
    folder, error = sys.argv[1], int(sys.argv[2])
    device = mount(folder)
    operation, number = ask(device)
    if operation != INIT:
        raise OSError(errno.EPROTO, "the kernel did not begin with INIT")
    answer(device, number, PROTOCOL.pack(7, 31, 0, 0, 12, 9, 65536, 1, 0, 0, 0, *[0] * 7))
    print("mounted", flush=True)
    if error:
        serve(device, error)
    sys.stdin.read()  # its end ends the mount


if __name__ == "__main__":
    main()
