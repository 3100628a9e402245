"""Small archives in the format of `cifar-10-python.tar.gz`, and hostile ones.

The published batches were written by Python 2: byte strings, protocol 2, names of an old numpy. No
writer of today makes such pickles, so the opcodes are put together here.
"""

import io
import struct
import tarfile

import numpy as np

BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def write_archive(path, *, images_per_batch, batches=None):
    """Write an archive whose classes can be told apart: the label is in the brightness."""
    draw = np.random.default_rng(0)
    with tarfile.open(path, "w:gz") as tar:
        for name in BATCHES:
            labels = draw.integers(0, 10, images_per_batch)
            noise = draw.integers(0, 25, (images_per_batch, 3 * 32 * 32))
            images = (noise + 25 * labels[:, None]).astype(np.uint8)
            content = (batches or {}).get(name) or pickle_batch(images, labels.tolist())
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def pickle_batch(images, labels):
    """Return the pickle that numpy and Python 2 made of a batch."""
    shape = b"M" + struct.pack("<H", images.shape[0]) + b"M" + struct.pack("<H", images.shape[1])
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01"
        + shape
        + b"\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + b"\x89T"
        + struct.pack("<i", images.nbytes)
        + images.tobytes()
        + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    label = _string(b"a batch")
    items = _string(b"batch_label") + label + _string(b"labels") + numbers
    items += _string(b"data") + array + _string(b"filenames") + b"]"
    return b"\x80\x02}(" + items + b"u."


def pickle_call(module, name, argument):
    """Return a pickle that calls `module.name(argument)` when an ordinary unpickler reads it."""
    return f"c{module}\n{name}\n".encode() + b"(" + _string(argument.encode()) + b"tR."


def _string(text):
    return b"U" + bytes([len(text)]) + text
