"""Wrong: the workflow's own body writes to the outside. After a crash it is replayed, and writes again.

    everstep crashtest effect_in_body.py '"ann"' --files '*.txt'

Right: the line belongs into a step.
"""

import functools

from everstep import step, workflow


@functools.cache
def diary():
    return open("diary.txt", "a")  # noqa: SIM115


@step(effect="read")
def look_up(name: str) -> str:
    diary()
    return f"{name}@example.org"


@step(effect="read")
def compose(address: str) -> str:
    return f"Dear {address}"


@workflow
def greet(name: str) -> str:
    address = look_up(name)
    diary().write(f"greeting {name}\n")  # the mistake
    diary().flush()
    return compose(address)
