"""What the ledger says: how often each effect was asked for and applied, in both runs, and whether that is right."""

from typing import TYPE_CHECKING, Any

import msgspec

from everstep.cli.terminal import clean, shortened, styled

if TYPE_CHECKING:
    from rich.table import Table

READS = frozenset({"ask_model"})


class Account(msgspec.Struct):
    """What happened to one action outside."""

    effect: str
    what: str
    contract: str
    requests: int = 0
    applied: int = 0
    requests_undisturbed: int = 0
    applied_undisturbed: int = 0

    @property
    def is_right(self) -> bool:
        """Whether the contract was kept: a read applies nothing, anything else is applied once, as if undisturbed."""
        once = 0 if self.contract == "read" else 1
        return self.applied == self.applied_undisturbed == once and min(self.requests, self.requests_undisturbed) > 0


def accounts(disturbed: list[dict[str, Any]], undisturbed: list[dict[str, Any]]) -> list[Account]:
    """Return an account for each action, by what it is: its effect and arguments. Keys differ between runs."""
    found: dict[tuple[str, str], Account] = {}
    for entries, suffix in ((disturbed, ""), (undisturbed, "_undisturbed")):
        for entry in entries:
            effect, what = entry["effect"], _what(entry["arguments"])
            contract = "read" if effect in READS else "repeat"
            account = found.setdefault((effect, entry["digest"]), Account(effect, what, contract))
            name = ("requests" if entry["kind"] == "request" else "applied") + suffix
            setattr(account, name, getattr(account, name) + 1)
    return list(found.values())


def same_key_each_time(entries: list[dict[str, Any]]) -> bool:
    """Tell whether every request for one action carried the same key."""
    keys: dict[tuple[str, str], set[str]] = {}
    for entry in entries:
        keys.setdefault((entry["effect"], entry["digest"]), set()).add(entry["key"])
    return all(len(one) == 1 for one in keys.values())


def _what(arguments: Any) -> str:
    return str(arguments[0] if isinstance(arguments, list) else arguments)


def draw_accounts(found: list[Account]) -> "Table":
    """Return the accounts as a table."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("what the outside saw")
    table.add_column("contract")
    table.add_column("undisturbed", justify="center")
    table.add_column("killed 3 times", justify="center")
    table.add_column("")
    for one in found:
        again = one.requests > one.requests_undisturbed
        name = styled(one.effect).append(f"  {shortened(clean(one.what), 30)}", style="dim")
        table.add_row(
            name,
            styled(one.contract, "dim"),
            styled(_counts(one.requests_undisturbed, one.applied_undisturbed, one.contract)),
            styled(_counts(one.requests, one.applied, one.contract), "bold" if again else ""),
            _remark(one, again=again),
        )
    return table


def _counts(requests: int, applied: int, contract: str) -> str:
    return f"{requests} asked" if contract == "read" else f"{requests} asked, {applied} applied"


def _remark(one: Account, *, again: bool) -> Any:
    if not one.is_right:
        return styled("✗ wrong", "bold red")
    text = styled("✓", "green")
    if again:
        said = "asked again: harmless" if one.contract == "read" else "asked again with the same key: applied once"
        text.append(f" {said}", style="yellow")
    return text
