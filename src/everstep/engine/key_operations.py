"""What may be done to the keys of effects from outside: decide about one by hand, forget old ones."""

from typing import TYPE_CHECKING, Any

from everstep.codec import ANY
from everstep.engine.journal import packed
from everstep.errors import KeyConflict, Misuse
from everstep.stores.keys import EffectRow, ForgetKeys, Forgotten, SettleKey
from everstep.stores.protocol import Accepted, Refused

if TYPE_CHECKING:
    from everstep.engine.app import App


async def free(app: "App", key: str, note: str, by: str) -> None:
    """Free a key, so that its action may be done (again)."""
    await _settle(app, SettleKey(key, app.clock.now(), by=by, note=note))


async def settle(app: "App", key: str, value: Any, note: str, by: str) -> None:
    """Give an outcome to a key that was left in doubt; whoever asks for it shares that."""
    payload = app.codec.encode(value, ANY, f"the outcome of {key!r}")
    row = await app.read(app.store.effect, key)
    seal = app.store.chain.seal(payload, key, row.step, row.arguments) if row is not None else ""
    await _settle(app, SettleKey(key, app.clock.now(), packed(payload), seal, by, note))


async def _settle(app: "App", operation: SettleKey) -> None:
    verdict = await app.committer.submit(operation)
    if isinstance(verdict, Accepted):
        app.pump.nudge()  # whoever waits for it has that in its inbox
        return
    assert isinstance(verdict, Refused)
    row = await app.read(app.store.effect, operation.key)
    if row is None or row.state == "free":
        raise Misuse(f"Nobody has the key {operation.key!r} in {app.store.url}. `everstep effects` lists the keys.")
    raise KeyConflict(_why_not(row), row.key, row.run)


def _why_not(row: EffectRow) -> str:
    if row.state == "done":
        return f"The key {row.key!r} has an outcome, of {row.step} in run {row.run}. Free it first, if it is wrong."
    state = "being undone" if row.state == "undoing" else "under way"
    return (
        f"The key {row.key!r} is {state}: {row.step} of run {row.run} has it, and that run may still settle it. Decide "
        f"about the run first: `everstep show {row.run}`."
    )


async def forget(app: "App", before: int) -> int:
    """Delete keys that are done or free and have not changed since; return how many."""
    forgotten = 0
    while True:
        verdict = await app.committer.submit(ForgetKeys(before))
        assert isinstance(verdict, Forgotten)
        forgotten += verdict.keys
        if verdict.keys < ForgetKeys(0).limit:
            return forgotten
