"""The same agent with Everstep: the deadline is a durable timer.

    python ask_right.py                                     # waits a second for a signal
    EVERSTEP_CRASH_AT=store.commit.after:2 python ask_right.py   # dies by SIGKILL when the timer is recorded
"""

import everstep
from everstep import workflow
from everstep.blocking import receive

PATIENCE = 0.5  # seconds; a day in real life


@workflow
def ask() -> str:
    print("I wait")
    try:
        return receive("answer", str, timeout=PATIENCE)
    except TimeoutError:
        return "nobody answered in time"


if __name__ == "__main__":
    print(everstep.run(ask, id="question-1"))
