"""Wrong: an object keeps what a step has found. After a crash the step is not done again, and the object is empty.

    everstep crashtest state_in_memory.py '"ann"'

Right: whatever a later step needs is an outcome of an earlier one.
"""

from everstep import step, workflow


class Session:
    def __init__(self) -> None:
        self.tokens: dict[str, str] = {}

    def log_in(self, user: str) -> None:
        self.tokens[user] = f"token of {user}"


session = Session()


@step(effect="read")
def log_in(user: str) -> None:
    session.log_in(user)  # the mistake


@step
def fetch(user: str) -> str:
    return f"mails, with the {session.tokens[user]}"


@workflow
def read_mails(user: str) -> str:
    log_in(user)
    return fetch(user)
