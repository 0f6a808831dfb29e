"""The nodes beside each other: what differs, who is missing, who cannot be reached, whose clock is off. Names the node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from stack.errors import LaunchError
from stack.submit.node import Report

MAX_SKEW_S = 5.0  # more upsets file times, locks and munge's credentials


class NotReady(LaunchError):
    """The nodes are not fit for training."""

    def __init__(self, faults: Sequence[str]):
        told = "\n".join(f"  - {fault}" for fault in faults)
        super().__init__(f"preflight found {len(faults)} fault(s):\n{told}")


def compare(reports: Mapping[str, Report]) -> list[str]:
    """Faults of the nodes' own and facts in which one differs from most. reports: by node, in the job's order."""
    faults = [f"{node}: {fault}" for node, report in reports.items() for fault in report.faults]
    for key in dict.fromkeys(key for report in reports.values() for key in report.facts):
        values = {node: report.facts.get(key, "none") for node, report in reports.items()}
        usual = Counter(values.values()).most_common(1)[0][0]  # of equals the first node's
        odd = [node for node, value in values.items() if value != usual]
        if odd:
            others = [node for node in values if node not in odd]
            told = ", ".join(f"{node} has {values[node]}" for node in odd)
            fix = (
                "install the same there"
                if key != "source"
                else "the project's folder differs there: a shared one, or the same commit"
            )
            faults.append(f"{key} differs: {told}; {some(others)} {usual}. Fix: {fix}")
    return faults


def missing(expected: Sequence[str], found: Sequence[str], waited_s: float, where: str) -> list[str]:
    """Nodes that said nothing to rank 0, which listens at `where`."""
    silent = [node for node in expected if node not in found]
    return [
        f"{node}: no word to {where} within {waited_s:.0f} s: it is down, or cannot reach that address, or Python does not "
        "start there. Fix: look at its own messages above, or leave it out: cluster.exclude"
        for node in silent
    ]


def unreachable(failures: Mapping[str, Mapping[str, str]]) -> list[str]:
    """failures: node -> the nodes that it could not connect to, with the reason. A node that most pairs share is named."""
    pairs = [(one, other) for one, others in failures.items() for other in others]
    if not pairs:
        return []
    count = Counter(node for pair in pairs for node in pair)
    worst, shared = count.most_common(1)[0]
    told = "; ".join(f"{one} to {other}: {failures[one][other]}" for one, other in pairs[:6])
    named = f"{worst}: takes part in {shared} of {len(pairs)} pairs of nodes that cannot reach each other"
    return [f"{named} ({told}). Fix: its network or firewall, or leave it out: cluster.exclude"]


def skewed(offsets_s: Mapping[str, float]) -> list[str]:
    """offsets_s: node -> seconds by which its clock is surely ahead of the first node's, below 0 behind it."""
    return [
        f"{node}: its clock is {abs(offset):.1f} s {'ahead' if offset > 0 else 'behind'}. Fix: time service (chrony) there"
        for node, offset in offsets_s.items()
        if abs(offset) > MAX_SKEW_S
    ]


def some(nodes: Sequence[str]) -> str:
    """`node1 has`, `node1, node2 have`, `12 others have`."""
    if len(nodes) > 4:
        return f"{len(nodes)} others have"
    return f"{', '.join(nodes)} {'has' if len(nodes) == 1 else 'have'}"


def slow(rates: Mapping[str, float]) -> list[str]:
    """Warnings: nodes whose own collective ran at less than half of the median's rate. rates: bytes a second."""
    usual = median(rates.values()) if rates else 0.0
    return [
        f"{node}: {rate / 1e9:.3g} GB/s within the node, the median is {usual / 1e9:.3g}"
        for node, rate in rates.items()
        if rate < usual / 2
    ]
