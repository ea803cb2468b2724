"""A run's graph in the terminal: each node with its visits and failures, the position of the run, and the edges it
took.
"""

from typing import TYPE_CHECKING, Final

from everstep.cli.terminal import add_fitted, clean, shortened, styled
from everstep.graph.definition import END, START
from everstep.graph.story import EdgeStory, NodeStory
from everstep.view.run import GraphView

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

MARKS: Final = {
    "": ("·", "dim"),
    "done": ("✓", "green"),
    "running": ("▸", "cyan"),
    "queued": ("◷", "blue"),
    "joins": ("◷", "blue"),
    "failed": ("✗", "red"),
}


def draw_graph(graph: GraphView, status: str, width: int) -> "RenderableType":
    """Return a run's graph as a table: a line a node, in the order of the definition."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim", pad_edge=False)
    for heading in ("", f"graph {clean(graph.name)}", "", "visits", "", "leads to"):
        table.add_column(heading, no_wrap=True, justify="right" if heading == "visits" else "left")
    add_fitted(table, [_cells(node, graph.edges, status) for node in graph.nodes], width)
    return table


def _cells(node: NodeStory, edges: list[EdgeStory], status: str) -> list["Text"]:
    mark, style = MARKS[node.state]
    if node.state == "running" and status in ("failed", "cancelled"):
        mark, style = "⊘", "yellow"
    entry = "→ " if any(edge.source == START and edge.target == node.name for edge in edges) else "  "
    visits = str(node.visits) if node.visits else ""
    return [
        styled(mark, style),
        styled(entry, "dim").append_text(styled(shortened(node.name, 28), "bold" if node.where else "")),
        styled(" ".join(filter(None, [node.effect or node.kind, f"join {node.join}" if node.join else ""])), "dim"),
        styled(visits, "cyan" if node.where else ""),
        _remark(node, status),
        _leads_to(node, edges),
    ]


def _remark(node: NodeStory, status: str) -> "Text":
    parts: list[tuple[str, str]] = []
    if node.failures:
        parts.append((f"{node.failures} failed", "red" if node.state == "failed" else "yellow"))
    if node.where:
        word = {"failed": "not finished", "cancelled": "not finished", "waiting": "waits"}.get(status, "is here")
        parts.append((f"{', '.join(node.where[:4])} {'failed' if node.state == 'failed' else word}", "cyan"))
    elif node.state == "joins":
        parts.append(("waits for other branches", "blue"))
    elif node.state == "queued":
        parts.append(("waits for a place", "blue"))
    text = styled("")
    for part, style in parts:
        text.append(" · " if text else "", style="dim").append(clean(part), style=style)
    return text


def _leads_to(node: NodeStory, edges: list[EdgeStory]) -> "Text":
    text = styled("")
    for edge in edges:
        if edge.source != node.name:
            continue
        how = f" {edge.how}" if edge.how else ""
        count = f" ×{edge.taken}" if edge.taken > 1 else ""
        name = "end" if edge.target == END else clean(edge.target)
        text.append(", " if text else "", style="dim")
        text.append(f"{name}{how}{count}", style="green" if edge.taken else "dim")
    return text
