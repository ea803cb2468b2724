"""What a run takes along into a fresh history, when its code says `continue_as`."""

import msgspec

from everstep.model.accounts import Accounts


class Carried(msgspec.Struct, omit_defaults=True):
    """All that a new generation keeps of the one before it. It stands in the new one's `run_started`."""

    head: str
    """The digest of the `run_continued` that ended the generation before: so the two histories are one chain."""
    created_at: int
    """When the run itself was started."""
    clock_started: int
    """When its time began, for its timeout."""
    signals: list[tuple[str, int, msgspec.Raw]] = []
    """What has arrived and was not received yet: name, number, value."""
    facts: dict[str, msgspec.Raw] = {}
    """What the run remembers of the outside, by subject."""
    published: dict[str, msgspec.Raw] = {}
    accounts: Accounts | None = None
    """What it has used, if it has a budget."""
    caution: str = ""
    """Why steps that must not happen twice are asked about: a part of the history is lost."""
    unseen_workers: list[str] = []
    uncompensated: list[str] = []
    """Steps that must not happen twice and that nothing undoes; some of them."""
