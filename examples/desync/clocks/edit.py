"""A person edits a note: `python edit.py lamp "45 euros"`. The file's time is what the machine's clock shows."""

import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    Path("notes").mkdir(exist_ok=True)
    path = Path("notes", sys.argv[1])
    path.write_text(sys.argv[2] + "\n")
    os.utime(path, (time.time(), time.time()))
