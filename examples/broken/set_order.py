"""Wrong: the workflow goes through a set. Its order differs from process to process, so a replay asks for other steps.

    everstep crashtest set_order.py

Right: go through `sorted(…)` of it.
"""

from everstep import step, workflow


@step(effect="read")
def translate(word: str) -> str:
    return word.upper()


@workflow
def dictionary() -> list[str]:
    words = {"tide", "moon", "salt", "sea", "shore", "wave"}
    found = [translate(word) for word in words]  # the mistake
    return sorted(found)
