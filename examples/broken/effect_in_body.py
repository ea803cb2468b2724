"""Wrong: the workflow's own body writes to the outside. After a crash it is replayed, and writes again.

    everstep crashtest effect_in_body.py '"ann"' --files diary.txt

Right: what writes is a step.
"""

from everstep import step, workflow

diary = open("diary.txt", "a")  # noqa: SIM115


@step(effect="read")
def look_up(name: str) -> str:
    return f"{name}@example.org"


@step(effect="read")
def compose(address: str) -> str:
    return f"Dear {address}"


@workflow
def greet(name: str) -> str:
    address = look_up(name)
    diary.write(f"greeting {name}\n")  # the mistake
    diary.flush()
    return compose(address)
