"""Pictures of a graph: as Mermaid text, and as an SVG that is pleasant on light and on dark."""

from collections.abc import Sequence
from html import escape

from everstep.graph.definition import END, START
from everstep.graph.layout import HEIGHT, Layout, Place, laid_out
from everstep.graph.story import EdgeStory, NodeStory

STYLE = """
text { font: 14px ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1c2026; }
.small { font-size: 11px; fill: #5b6470; }
.box { fill: #ffffff; stroke: #9aa4b2; stroke-width: 1.4; }
.dot { fill: #5b6470; stroke: none; }
.ring { fill: none; stroke: #5b6470; stroke-width: 1.4; }
.edge { fill: none; stroke: #9aa4b2; stroke-width: 1.5; }
.head { fill: #9aa4b2; stroke: none; }
.if { stroke-dasharray: 5 4; }
.taken { stroke: #1f7a5a; stroke-width: 2; }
.takenhead { fill: #1f7a5a; }
.done { fill: #e7f5ee; stroke: #1f7a5a; }
.running { fill: #e8f0fd; stroke: #2f6fd0; }
.queued, .joins { fill: #fdf5e3; stroke: #b07d12; }
.failed { fill: #fdecea; stroke: #c0392b; }
@media (prefers-color-scheme: dark) {
  text { fill: #dee2e8; } .small { fill: #9aa4b2; }
  .box { fill: #262b33; stroke: #6b7480; } .dot { fill: #9aa4b2; } .ring { stroke: #9aa4b2; }
  .edge { stroke: #6b7480; } .head { fill: #6b7480; }
  .taken { stroke: #40ba8c; } .takenhead { fill: #40ba8c; }
  .done { fill: #1d3a30; stroke: #40ba8c; } .running { fill: #1e2f4d; stroke: #6898e8; }
  .queued, .joins { fill: #3d3319; stroke: #deae54; } .failed { fill: #46211f; stroke: #e85d56; }
}
"""
SHAPES = {"step": "{}[{}]", "code": "{}([{}])", "graph": "{}[[{}]]", "approval": "{}{{{{{}}}}}"}


# -- Mermaid ----------------------------------------------------------------------------------------------------------
def mermaid(nodes: Sequence[NodeStory], edges: Sequence[EdgeStory]) -> str:
    """Return a graph as Mermaid text."""
    ids = {node.name: f"n{number}" for number, node in enumerate(nodes, 1)} | {START: "start", END: "done"}
    lines = ["flowchart TD", "    start((start))"]
    for node in nodes:
        label = f'"{_plain(node.name)}{f"<br/>{node.effect}" if node.effect else ""}"'
        lines.append("    " + SHAPES.get(node.kind, "{}[{}]").format(ids[node.name], label))
    if any(edge.target == END for edge in edges):
        lines.append("    done((end))")
    for edge in edges:
        arrow = f"-. {edge.how} .->" if edge.how else "-->"
        lines.append(f"    {ids[edge.source]} {arrow} {ids[edge.target]}")
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return escape(text, quote=True).replace("&", "#").replace("##", "#") if any(c in text for c in '"<>&') else text


# -- SVG --------------------------------------------------------------------------------------------------------------
def svg(title: str, nodes: Sequence[NodeStory], edges: Sequence[EdgeStory]) -> str:
    """Return a graph as an SVG, with the events of a run if there are any."""
    widths = {node.name: max(84.0, 8.2 * max(len(node.name), 0.8 * len(_below(node))) + 28) for node in nodes}
    widths[START] = 16.0
    pairs = [(edge.source, edge.target) for edge in edges]
    ends = {source for source, _ in pairs}
    pairs += [(node.name, END) for node in nodes if node.name not in ends]
    if any(target == END for _, target in pairs):
        widths[END] = 18.0
    layout = laid_out(widths, pairs, START)
    told = {(edge.source, edge.target): edge for edge in edges}
    happened = any(node.visits for node in nodes)
    parts = [_edge(layout, pair, told.get(pair), nodes) for pair in pairs]
    parts += [_node(layout.places[node.name], node, happened=happened) for node in nodes]
    parts.append(f'<circle class="dot" cx="{layout.places[START].x:.1f}" cy="{layout.places[START].y:.1f}" r="6"/>')
    if END in layout.places:
        end = layout.places[END]
        parts.append(f'<circle class="ring" cx="{end.x:.1f}" cy="{end.y:.1f}" r="8"/>')
        parts.append(f'<circle class="dot" cx="{end.x:.1f}" cy="{end.y:.1f}" r="4"/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {layout.width:.0f} {layout.height:.0f}"'
    size = f'width="{layout.width:.0f}" height="{layout.height:.0f}" role="img"'
    body = "\n".join(part for part in parts if part)
    return f"{head} {size}>\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n"


def _below(node: NodeStory) -> str:
    """Return the text below a node's name."""
    words = [node.effect or {"code": "code", "graph": "graph", "approval": "asks a person"}.get(node.kind, "")]
    if node.join:
        words.append(f"join {node.join}")
    if node.visits > 1:
        words.append(f"{node.visits} visits")
    if node.failures:
        words.append(f"{node.failures} failed")
    return " · ".join(word for word in words if word)


def _node(place: Place, node: NodeStory, *, happened: bool) -> str:
    left, top = place.x - place.width / 2, place.y - HEIGHT / 2
    round_ = {"step": 7, "graph": 2, "approval": 19}.get(node.kind, 19)
    state = f" {node.state}" if happened and node.state else ""
    box = f'<rect class="box{state}" x="{left:.1f}" y="{top:.1f}" width="{place.width:.1f}" height="{HEIGHT:.0f}"'
    inner = ""
    if node.kind == "graph":
        inner = (
            f'<rect class="box{state}" x="{left + 3:.1f}" y="{top + 3:.1f}" width="{place.width - 6:.1f}" '
            f'height="{HEIGHT - 6:.0f}" rx="2"/>'
        )
    name = f'<text x="{place.x:.1f}" y="{place.y - 1:.1f}" text-anchor="middle">{escape(node.name)}</text>'
    below = f'<text class="small" x="{place.x:.1f}" y="{place.y + 13:.1f}" text-anchor="middle">{_below(node)}</text>'
    return f'{box} rx="{round_}"/>{inner}{name}{below}'


def _edge(layout: Layout, pair: tuple[str, str], told: EdgeStory | None, nodes: Sequence[NodeStory]) -> str:
    points = layout.ways.get(pair)
    if points is None:
        return ""
    by_name = {node.name: node for node in nodes}
    taken = told.taken if told is not None else int(pair[1] == END and by_name[pair[0]].finished > 0)
    how = told.how if told is not None else ""
    start_gap = 8 if pair[0] == START else HEIGHT / 2
    end_gap = 10 if pair[1] == END else HEIGHT / 2
    classes = "edge" + (" if" if how.startswith("if") else "") + (" taken" if taken else "")
    head = "head takenhead" if taken else "head"
    if len(points) == 4 and points[1][0] == points[2][0] and points[1][1] == points[0][1]:
        path, tip = _round_the_side(layout, pair, points)
        arrow = f'<path class="{head}" d="M{tip[0]:.1f},{tip[1]:.1f} l8,-4 v8 z"/>'
        label_at = (points[1][0] + 5, (points[1][1] + points[2][1]) / 2 + 4)
    else:
        path = _downwards(points, start_gap, end_gap)
        x, y = points[-1][0], points[-1][1] - end_gap
        arrow = f'<path class="{head}" d="M{x:.1f},{y:.1f} l-4,-8 h8 z"/>'
        (x1, y1), (x2, y2) = points[-2], points[-1]
        label_at = ((x1 + x2) / 2 + 6, (y1 + y2) / 2 + 4)
    words = [how, f"×{taken}" if taken > 1 else ""]
    label = " ".join(word for word in words if word)
    text = f'<text class="small" x="{label_at[0]:.1f}" y="{label_at[1]:.1f}">{escape(label)}</text>' if label else ""
    return f'<path class="{classes}" d="{path}"/>{arrow}{text}'


def _downwards(points: Sequence[tuple[float, float]], start_gap: float, end_gap: float) -> str:
    """Return a smooth path from layer to layer."""
    (x, y), rest = points[0], points[1:]
    y += start_gap
    path = f"M{x:.1f},{y:.1f}"
    for number, (to_x, at_y) in enumerate(rest, 1):
        to_y = at_y - end_gap - 7 if number == len(rest) else at_y
        bend = (to_y - y) / 2
        path += f" C{x:.1f},{y + bend:.1f} {to_x:.1f},{to_y - bend:.1f} {to_x:.1f},{to_y:.1f}"
        x, y = to_x, to_y
    return path


def _round_the_side(
    layout: Layout, pair: tuple[str, str], points: Sequence[tuple[float, float]]
) -> tuple[str, tuple[float, float]]:
    """Return the path of an edge that goes round a cycle: out at the side, up, and in again."""
    one, two = layout.places[pair[0]], layout.places[pair[1]]
    side, out, into = points[1][0], one.x + one.width / 2, two.x + two.width / 2
    down = 8 if pair[0] == pair[1] else 0
    y1, y2 = one.y + down, two.y - down
    bend = min(12.0, abs(y1 - y2) / 2 or 12.0)
    path = (
        f"M{out:.1f},{y1:.1f} H{side - bend:.1f} Q{side:.1f},{y1:.1f} {side:.1f},{y1 - bend:.1f} "
        f"V{y2 + bend:.1f} Q{side:.1f},{y2:.1f} {side - bend:.1f},{y2:.1f} H{into + 7:.1f}"
    )
    return path, (into, y2)
