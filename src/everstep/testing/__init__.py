"""For testing durable programs: a clock that stands still, an independent ledger of effects, and a checker.

Import from the modules: `everstep.testing.clock`, `everstep.testing.ledger`, `everstep.testing.checker`.
"""
