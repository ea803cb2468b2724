"""The same agent with Everstep: the deadline is a durable timer.

    EVERSTEP_CRASH_AT=store.commit.after:2 python at.py 12:00 ask_right.py   # dies when the timer is recorded
    python at.py 12:00 --then 11:00 ask_right.py                             # goes on by its history

A restart neither prolongs nor repeats the wait.
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
