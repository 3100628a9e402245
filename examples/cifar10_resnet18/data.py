"""CIFAR-10: the published archive as plain arrays, and the arrays as datasets.

The batches in `cifar-10-python.tar.gz` are pickles, and a pickle can run any code while it is
read. These are read by an unpickler that knows three names, those that the published batches hold,
and gives even for them only stand-ins of its own: nothing outside this file can be called.
"""

import pickle
import tarfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
TRAIN_BATCHES = [f"data_batch_{number}" for number in range(1, 6)]
TEST_BATCHES = ["test_batch"]
MAX_BATCH_BYTES = 64 << 20  # a published one has 31 MB
PADDING = 4

# Means and deviations of the 50,000 training images, by colour, of values from 0 to 1.
MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
STD = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)


class _Array:
    """Stands for numpy.ndarray; takes shape and bytes from the state that numpy wrote."""

    def __setstate__(self, state):
        _version, self.shape, self.dtype, _is_fortran, self.content = state


class _Dtype:
    """Stands for numpy.dtype; `code` is `u1` for unsigned bytes."""

    def __init__(self, code, *_):
        self.code = code

    def __setstate__(self, state):
        """Byte order and alignment say nothing about single bytes."""


def _make_array(*_):
    """Stand for numpy's _reconstruct: an empty array, which the state fills."""
    return _Array()


class BatchUnpickler(pickle.Unpickler):
    """Reads one of CIFAR's batches and refuses every other pickle."""

    KNOWN = {
        ("numpy.core.multiarray", "_reconstruct"): _make_array,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
    }

    def find_class(self, module, name):
        """Return the stand-in for a name that a batch may hold."""
        if (module, name) not in self.KNOWN:
            raise pickle.UnpicklingError(f"`{module}.{name}` has no place in a batch of CIFAR-10")
        return self.KNOWN[module, name]


def read_batch(file):
    """Return a batch's images, shape (n, 3, 32, 32), and labels, shape (n,); both uint8."""
    content = BatchUnpickler(file, encoding="bytes").load()
    array, labels = content[b"data"], content[b"labels"]
    if array.dtype.code != b"u1" or array.shape != (len(labels), 3 * 32 * 32):
        raise ValueError(f"a batch with {len(labels)} labels holds an array of {array.shape}")
    images = np.frombuffer(array.content, dtype=np.uint8).reshape(len(labels), 3, 32, 32)
    return images, np.array(labels, dtype=np.uint8)


def unpack(archive, folder):
    """Write the archive's images and labels as .npy files into `folder`, nothing else of it."""
    batches = {}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            name = Path(member.name).name
            if member.isfile() and name in TRAIN_BATCHES + TEST_BATCHES:
                if member.size > MAX_BATCH_BYTES:
                    raise ValueError(f"{member.name} has {member.size} bytes: no batch of CIFAR-10")
                batches[name] = read_batch(tar.extractfile(member))
    for part, names in (("train", TRAIN_BATCHES), ("test", TEST_BATCHES)):
        if missing := [name for name in names if name not in batches]:
            raise ValueError(f"{archive} has no {', '.join(missing)}")
        images, labels = zip(*[batches[name] for name in names], strict=True)
        np.save(folder / f"{part}_images.npy", np.concatenate(images))
        np.save(folder / f"{part}_labels.npy", np.concatenate(labels))


class Images(Dataset):
    """Some of the images of a folder that `unpack` filled; `augment` crops and flips at random."""

    def __init__(self, folder, part, indices=None, *, augment=False):
        # Mapped, not read: all processes of a node share one copy in memory.
        self.images = np.load(folder / f"{part}_images.npy", mmap_mode="r")
        self.labels = np.load(folder / f"{part}_labels.npy", mmap_mode="r")
        self.indices = range(len(self.labels)) if indices is None else indices
        self.augment = augment

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, position):
        index = self.indices[position]
        image = torch.from_numpy(self.images[index].copy())
        if self.augment:
            image = crop_and_flip(image)
        return (image / 255 - MEAN) / STD, int(self.labels[index])


def crop_and_flip(image):
    """Return a random 32x32 part of the padded image, mirrored half of the time.

    Draws from torch's generator: torchmuster's loader seeds it for each sample and epoch, so a
    sample is augmented alike on any rank and after any restart.
    """
    padded = F.pad(image, [PADDING] * 4)
    top, left = torch.randint(2 * PADDING + 1, (2,)).tolist()
    image = padded[:, top : top + 32, left : left + 32]
    return image.flip(2) if torch.rand(()) < 0.5 else image


def split(num_samples, valid_share=0.1):
    """Return the indices to train on and those to validate with; always the same ones."""
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(0)).tolist()
    num_valid = int(num_samples * valid_share)
    return order[num_valid:], order[:num_valid]
