"""Where tests keep what they write: in memory, where there is enough of it.

Tests make many thousand commits, each with its fsync. On a disk that other programs keep busy one of those may take
seconds, and no test is about that: what a loss of power leaves behind is simulated.
"""

import os
import shutil
from pathlib import Path

FOLDER = Path("/dev/shm")
BYTES_MIN = 4 * 1024**3
"""In a container it is often 64 MB, which is not enough for one server."""


def memory_folder() -> str | None:
    """Return a folder in memory; None if there is none that is large enough."""
    if not (FOLDER.is_dir() and os.access(FOLDER, os.W_OK)):
        return None
    return str(FOLDER) if shutil.disk_usage(FOLDER).free >= BYTES_MIN else None
