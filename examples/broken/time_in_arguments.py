"""Wrong: the workflow asks the machine for the time. A replay gets another one, and so asks for another step.

    everstep crashtest time_in_arguments.py '"tides"'

Right: `everstep.now()`, which is the same in every replay.
"""

import time

from everstep import step, workflow


@step(effect="read")
def look_up(topic: str, at: float) -> str:
    return f"{topic}, of today"


@step(effect="read")
def shorten(text: str) -> str:
    return text[:5]


@workflow
def news(topic: str) -> str:
    text = look_up(topic, time.time())  # the mistake
    return shorten(text)
