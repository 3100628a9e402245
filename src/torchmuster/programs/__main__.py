"""Start an agent by its path: `python -I -S .../torchmuster/programs/__main__.py OPTIONS`.

No environment variable and no `site` can disturb it, and nothing outside the standard library is needed.
"""

import os
import sys

if __package__ in (None, ""):
    _package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    sys.path.insert(0, os.path.dirname(_package))

from torchmuster.programs.main import main

if __name__ == "__main__":
    main(sys.argv[1:])
