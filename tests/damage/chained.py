"""What the tests of chain keys share."""

from typing import Any, Final

from everstep.engine.app.app import App
from everstep.model.chains import ChainKeys, chain_keys
from tests.engine.resume_helpers import Machine

KEY: Final = b"k" * 32
OTHER: Final = b"o" * 32


async def booted(machine: Machine, *keys: bytes | None, recover: bool = False, **options: Any) -> App:
    """Start a process that has some keys, or none."""
    store = machine.open_store()
    store.chain = chain_keys(list(keys)) if keys else ChainKeys()
    return await machine.boot(store=store, recover=recover, **options)
