"""The program of the test job of `muster engines check`: writes what the job's Python finds.

    python check_probe.py WORKING_DIRECTORY OUTPUT

Standard library only, without torchmuster: the job's Python may be any, with or without torch.
"""

import importlib
import json
import os
import platform
import sys


def look(working_directory: str) -> "dict[str, object]":
    """Return the findings as plain values."""
    found: dict[str, object] = {
        "node": platform.node(),
        "processor": platform.machine(),
        "python": sys.executable,
        "python_version": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "sees_cwd": os.path.isdir(working_directory),
    }
    try:
        torch = importlib.import_module("torch")  # by name: the job decides which torch it is

        found["torch"] = torch.__version__
        found["gpus"] = torch.cuda.device_count()
    except Exception as error:  # noqa: BLE001 - a broken library may raise anything
        found["torch_error"] = type(error).__name__ + ": " + str(error)[:300]
    return found


def main(arguments: "list[str]") -> None:
    """Write the findings, completely or not at all."""
    working_directory, output = arguments
    with open(output + ".tmp", "w") as file:
        json.dump(look(working_directory), file)
    os.replace(output + ".tmp", output)


if __name__ == "__main__":
    main(sys.argv[1:])
