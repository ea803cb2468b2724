"""For testing durable programs: an independent ledger of effects, and a checker that judges by it.

Import from the modules: `everstep.testing.ledger`, `everstep.testing.checker`.
"""
