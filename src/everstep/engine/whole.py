"""All of the engine, for processes that live long: once this is imported, nothing of it is loaded later.

A worker process imports it first, and any app that takes up whatever is free (`recover`) when it becomes a worker. From
then on it needs no more of the installation: a release that is installed while it runs is not mixed with it, and a
process that has no file left to open can still hold a run.
"""

# ruff: noqa: F401  # they are imported to be there

import everstep.effects.answers
import everstep.effects.atomic
import everstep.effects.charging
import everstep.effects.databases
import everstep.effects.files
import everstep.effects.keying
import everstep.effects.postgres_markers
import everstep.effects.saga
import everstep.effects.statement_guard
import everstep.effects.transaction
import everstep.effects.witnesses
import everstep.engine.accounts
import everstep.engine.approvals
import everstep.engine.approving
import everstep.engine.asking
import everstep.engine.blocking_app
import everstep.engine.books
import everstep.engine.budget_commands
import everstep.engine.budgets
import everstep.engine.checkpointing
import everstep.engine.checkpoints
import everstep.engine.children
import everstep.engine.client
import everstep.engine.collecting
import everstep.engine.compensating
import everstep.engine.continuing
import everstep.engine.crossing
import everstep.engine.diagnosis
import everstep.engine.doubts
import everstep.engine.drift
import everstep.engine.exchanging
import everstep.engine.existing
import everstep.engine.exporting
import everstep.engine.forced_ends
import everstep.engine.fork_points
import everstep.engine.forking
import everstep.engine.generations
import everstep.engine.greenlets
import everstep.engine.halves
import everstep.engine.holding
import everstep.engine.inbox
import everstep.engine.inside
import everstep.engine.interrupted
import everstep.engine.judging
import everstep.engine.key_operations
import everstep.engine.keys
import everstep.engine.limits
import everstep.engine.losses
import everstep.engine.markers
import everstep.engine.moving
import everstep.engine.moving_saved
import everstep.engine.narrowing
import everstep.engine.operations
import everstep.engine.outbox
import everstep.engine.past
import everstep.engine.performing
import everstep.engine.repairing
import everstep.engine.replay
import everstep.engine.requests
import everstep.engine.restoring
import everstep.engine.rollback
import everstep.engine.saga
import everstep.engine.saved
import everstep.engine.schedules
import everstep.engine.scheduling
import everstep.engine.spending
import everstep.engine.stalls
import everstep.engine.streaming
import everstep.engine.streams
import everstep.engine.surrounding
import everstep.engine.telling
import everstep.engine.tools
import everstep.engine.transacting
import everstep.engine.unwinding
import everstep.engine.watchdog
import everstep.engine.webhooks
import everstep.engine.witnessing
import everstep.model.markers
import everstep.model.retention
import everstep.model.schedules
import everstep.stores.sql.keys
import everstep.stores.sql.moving
import everstep.stores.sql.nul
import everstep.stores.sql.queues
import everstep.stores.sql.repairs
import everstep.stores.sql.schedules
