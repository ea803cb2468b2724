"""The first event of a run."""

import random
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from everstep.codec import Arguments, Codec, as_declared
from everstep.engine.code.workflow import NamedWorkflow, Workflow
from everstep.engine.history.clock import SECOND
from everstep.engine.history.journal import INLINE_BYTES_MAX, store_payload
from everstep.engine.history.restored import restores_in
from everstep.engine.history.verify import preview_text
from everstep.errors import NotDecodable, WrongType
from everstep.model.accounts import accounts_of
from everstep.model.budgets import Allotment
from everstep.model.carried import Carried
from everstep.model.chains import ChainKey
from everstep.model.digests import chain_next, chain_start
from everstep.model.events import NO_PAYLOAD, EventRow, RunStarted, encode_body
from everstep.model.ids import checked_name
from everstep.model.options import checked_seconds, checked_tags, checked_whole
from everstep.model.semantics import SEMANTICS
from everstep.model.status import Status
from everstep.stores.protocol import NewRun, RunRow
from everstep.stores.rows.queues import DEFAULT_QUEUE

NO_NAMES: Final[Mapping[str, Any]] = MappingProxyType({})
PYTHON: Final = ".".join(str(part) for part in sys.version_info[:3])


def new_entropy(randomness: random.Random) -> str:
    """Return 128 random bits: the root of all keys of a run or branch."""
    return randomness.randbytes(16).hex()


class Origin(msgspec.Struct):
    """The properties of a new run that come from the app that starts it, and from its parent if it has one."""

    chain: ChainKey
    """The chain key of its digests."""
    life: str
    """The store's present life."""
    unseen: bool = False
    """Whether a parent may have started it before, in a part of its history that is lost."""
    entropy: str = ""
    """The entropy that a parent gives its child. Any other run's is random."""


def _started(
    workflow: "Workflow | NamedWorkflow", arguments: Arguments, origin: Origin
) -> tuple[RunStarted, Sequence[tuple[str, bytes]]]:
    """Return the body of the first event, and the arguments separately if they are large."""
    payload, ref = arguments.payload, ""
    payloads: Sequence[tuple[str, bytes]] = ()
    if len(payload) > INLINE_BYTES_MAX:
        stored, ref = store_payload(payload)
        payload, payloads = b"", [(ref, stored)]
    body = RunStarted(
        workflow=workflow.name,
        version=workflow.version,
        semantics=SEMANTICS,
        python=PYTHON,
        entropy="",
        arguments=msgspec.Raw(payload) if payload else NO_PAYLOAD,
        arguments_ref=ref,
        timeout=workflow.timeout,
        digest=arguments.digest,
        restored=restores_in(origin.life),
        life=origin.life,
        chain=origin.chain.id,
        unseen=origin.unseen,
        unchecked=isinstance(workflow, NamedWorkflow),
    )
    return body, payloads


def start_arguments(
    codec: Codec, target: "Workflow | NamedWorkflow", args: Sequence[Any], kwargs: Mapping[str, Any] = NO_NAMES
) -> Arguments:
    """Return the arguments of a start, each as it is declared. Raises `WrongType` for one that cannot be that."""
    placed, named = list(args), dict(kwargs)
    for place, name, annotation in target.signature.declared(args, kwargs):
        if annotation is Any:
            continue
        given: Any = placed if isinstance(place, int) else named
        try:
            given[place] = as_declared(given[place], annotation)
        except NotDecodable as refused:
            if given[place] is None and target.signature.may_be_none(name):
                continue
            target.signature.normalise(tuple(args), dict(kwargs))  # too many or too few of them is the first to say
            raise WrongType(
                f"{target.name}: the argument {name} is {refused}. Nothing was started.", str(refused)
            ) from None
    return codec.encode_arguments(target.signature, tuple(placed), named, target.name)


def refuse_start_options(priority: Any, delay: Any, tags: Any, queue: Any = None) -> float:
    """Refuse options of a start that could not be stored, and return the delay in seconds. (Almost every start has the
    defaults.)
    """
    if type(priority) is not int or priority != 0:
        checked_whole("priority", priority, least=-(2**31), most=2**31)
    if type(delay) is not float or delay != 0.0:
        delay = checked_seconds("delay", delay)
    if queue is not None:
        checked_name(queue, "queue")
    if tags is not None:
        checked_tags(tags)
    return delay  # type: ignore[no-any-return]  # a float already, or checked


def new_run(
    workflow: "Workflow | NamedWorkflow",
    run: str,
    arguments: Arguments,
    *,
    at: int,
    randomness: random.Random,
    parent: str | None = None,
    call: int = 0,
    generation: int = 1,
    owner: str | None = None,
    tags: dict[str, str] | None = None,
    priority: int = 0,
    queue: str | None = None,
    wake_at: int | None = None,
    origin: Origin,
    budget: Allotment | None = None,
    carried: "Carried | None" = None,
    first_arguments: str = "",
) -> NewRun:
    """Return a run to be created: its row and its `run_started`. With an owner it is `running`, else `queued`."""
    body, payloads = _started(workflow, arguments, origin)
    body.entropy = origin.entropy or new_entropy(randomness)
    body.parent = parent or ""
    body.delay = (wake_at - at) / SECOND if wake_at is not None else 0.0
    body.budget = budget
    if carried is not None:
        body.carried, body.digest = carried, first_arguments
    encoded = encode_body(body)
    digest = chain_next(chain_start(run, generation), 1, "run_started", "", at, encoded, origin.chain.key)
    status: Status = "running" if owner else "queued"
    if wake_at is not None and (queue or workflow.queue) == DEFAULT_QUEUE:  # otherwise it waits in its queue, for both
        status = "waiting"
    row = RunRow(
        id=run,
        workflow=workflow.name,
        version=workflow.version,
        semantics=SEMANTICS,
        status=status,
        generation=generation,
        head_seq=1,
        head_digest=digest,
        epoch=1 if owner else 0,
        owner=owner,
        wake_at=wake_at,
        queue=queue or workflow.queue,
        priority=priority,
        tags=tags or {},
        parent=parent,
        arguments=body.digest,
        preview=preview_text(arguments.payload),
        created_at=carried.created_at if carried is not None else at,
        updated_at=at,
    )
    if budget is not None:
        row.budget = encode_body(accounts_of(body, at).standing())
    if carried is not None and carried.published:
        row.published = msgspec.json.encode(carried.published)
    event = EventRow(1, "run_started", "", at, encoded, digest)
    return NewRun(row, event, payloads, parent, call, started=body)


def continued_run(
    workflow: Workflow,
    row: RunRow,
    arguments: Arguments,
    *,
    at: int,
    owner: str,
    randomness: random.Random,
    origin: Origin,
    budget: Allotment | None,
    carried: "Carried",
) -> NewRun:
    """Return the next generation of a run, as its code requested it.

    A repeated start still names the arguments of the first generation, so the row keeps their digest.
    """
    return new_run(
        workflow,
        row.id,
        arguments,
        at=at,
        randomness=randomness,
        generation=row.generation + 1,
        owner=owner,
        tags=row.tags,
        priority=row.priority,
        queue=row.queue,
        parent=row.parent,
        origin=origin,
        budget=budget,
        carried=carried,
        first_arguments=row.arguments,
    )
