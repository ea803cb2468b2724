"""Wrong: the workflow's own body writes a file. Everstep sees this one at once, also without a crash.

    everstep crashtest file_in_body.py '"ann"'

Right: what writes is a step, or `everstep.files.write`.
"""

from pathlib import Path

from everstep import step, workflow


@step(effect="read")
def compose(name: str) -> str:
    return f"Dear {name}"


@workflow
def greet(name: str) -> str:
    text = compose(name)
    Path("letter.txt").write_text(text)  # the mistake
    return text
