"""The same with DBOS: `resume_dbos.py FOLDER MARK STEPS`. When launched it takes up what was left behind."""

import sys
import time
from pathlib import Path

from dbos import DBOS, SetWorkflowID
from place import is_empty, url_of

FOLDER, MARK, LAST = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])


@DBOS.step()
def act(x: int) -> int:
    if x == LAST:
        MARK.write_text(str(time.time_ns()))
        time.sleep(600)
    return x + 1


@DBOS.workflow()
def acting() -> int:
    x = 0
    while x <= LAST:
        x = act(x)
    return x


if __name__ == "__main__":
    is_new = is_empty(FOLDER)
    DBOS(config={"name": "bench", "system_database_url": url_of(FOLDER, "dbos"), "log_level": "ERROR"})
    DBOS.launch()
    if is_new:
        with SetWorkflowID("killed"):
            acting()
    time.sleep(600)
