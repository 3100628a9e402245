"""Commit one fault on the device: `fault.py FAULT`."""

import sys

from torchmuster.gpucheck.scripts import gpu

_FAULTS = {
    "memory": gpu.run_out_of_memory,
    "assert": gpu.assert_on_device,
    "address": gpu.write_to_illegal_address,
}

if __name__ == "__main__":
    gpu.touch()
    gpu.say(begun=True)
    if not gpu.is_broken("fault"):
        _FAULTS[sys.argv[1]]()
