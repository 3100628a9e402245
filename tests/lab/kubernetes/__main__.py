"""`make lab-kubernetes KUBE_BIN=FOLDER`: sees that all is there, and proves on a real cluster what the page claims."""

import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path[0] = str(REPOSITORY / "tests")


def main():
    from lab.kubernetes.programs import why_not

    if (reason := why_not()) is not None:
        lines = reason.replace("\n", "\n           ")
        print(f"error: there can be no Kubernetes here\n  because: {lines}", file=sys.stderr)
        print("hint: as root, make lab-kubernetes KUBE_BIN=FOLDER", file=sys.stderr)
        sys.exit(2)
    words = [sys.executable, "-m", "pytest", "--timeout=600", str(Path(__file__).parent)]
    os.execve(sys.executable, [*words, *sys.argv[1:]], {**os.environ, "MUSTER_LAB": "kubernetes"})


if __name__ == "__main__":
    main()
