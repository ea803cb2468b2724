"""Workflows with secret steps, for several files of tests: one module, so that there is one set of what fails."""

import everstep
from everstep import Retry, Unknown, step, workflow
from tests.effects.shown import MARK

FAILING: set[str] = set()


@step(effect="read", secret=True, retry=Retry(attempts=2, first=0.0, jitter=0.0))
async def read_token(hint: str) -> str:
    everstep.heartbeat({"so far": MARK})
    if "once" in FAILING:
        FAILING.discard("once")
        raise ConnectionError(f"{MARK} was refused")
    if "always" in FAILING:
        raise ValueError(f"{MARK} was refused")
    return f"token {MARK}"


def ask(key: str, hint: str) -> Unknown:
    return Unknown(f"{MARK}: no answer")


@step(effect="once", secret=True, probe=ask, probe_for=0.0)
async def use_token(hint: str) -> str:
    raise ConnectionError(f"{MARK} was cut off")


@workflow
async def secretive() -> int:
    token = await read_token(f"{MARK}-hint")
    await everstep.receive("go", bool)
    return len(token)


@workflow
async def losing_token() -> int:
    try:
        return len(await read_token(f"{MARK}-hint"))
    except ValueError as error:
        raise RuntimeError("no token") from error


@workflow
async def parent_of_losing_token() -> int:
    return await losing_token()


@workflow
async def doubtful() -> str:
    return await use_token(f"{MARK}-hint")
