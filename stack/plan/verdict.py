"""Whether a run fits its machine: `fits`, `tight`, `does not fit` or `unproven`, with the reasons.

For a launch:

    from stack.plan.verdict import gate
    found = gate(cfg, world)            # a Verdict; .answer, .reasons, .forecast
    if found.refuses(cfg.plan.gate): ...

The rule. Need is the forecast's live bytes with a margin for what no CPU can know: 5 % and 2 GiB on one device, 12 % and
NCCL's buffers and 4 GiB on several (so that no length which a published run calls its longest is a certain fit); with
constants that a run of as many ranks measured on the machine 3 % and what was measured. A need above the card's memory does
not fit; within a tenth of it is tight. Where published runs have been found to need more than this forecast says, the
answer is `unproven` in place of `fits`: over 16 ranks a row, over 2 nodes, over 30 billion parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stack.config.schema import RunConfig
from stack.plan.closed_form import plan
from stack.plan.forecast import GIB, Forecast
from stack.plan.machine import Machine, read_machine

FITS, TIGHT, UNPROVEN, NO = "fits", "tight", "unproven", "does not fit"
EXIT_CODES = {FITS: 0, TIGHT: 3, NO: 4, UNPROVEN: 5}
"""Of launch/plan.py."""

CLOSE = 0.9
"""Share of the card's or the host's memory from which a need is tight."""

HOST_SHARE = 0.95
"""Of a node's host memory that ranks can have; the rest is the system's."""

PROVEN_SP, PROVEN_NODES, PROVEN_PARAMETERS = 16, 2, 30e9


@dataclass
class Verdict:
    """answer: one of `EXIT_CODES`. need_bytes: of the card, with the margin; card_bytes, host_bytes: what the card and a
    node's host have, 0 if unknown."""

    answer: str
    reasons: list[str]
    need_bytes: int
    card_bytes: int
    forecast: Forecast = field(repr=False)
    host_bytes: int = 0

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.answer]

    def refuses(self, policy: str) -> bool:
        """Whether a launch under `plan.gate=policy` is to be refused."""
        return policy == "refuse" and self.answer == NO


def need_of(forecast: Forecast, machine: Machine) -> int:
    """Bytes of the card that the run may need."""
    memory, ranks = forecast.memory, int(forecast.run["ranks"])
    peak = memory.peak.num_bytes
    if machine.site.device == "cpu":
        return peak
    if machine.calibrated(ranks):
        return round(1.03 * memory.needed_bytes)
    if ranks == 1:
        return round(1.05 * peak + 2 * GIB)
    return round(1.12 * peak + memory.communication_bytes + 4 * GIB)


def verdict(forecast: Forecast, machine: Machine) -> Verdict:
    """Raises nothing: what is not known makes a run unproven."""
    site = machine.site
    card = round((site.memory_gib or 0) * GIB)
    need = need_of(forecast, machine)
    reasons: list[str] = []
    answers = {FITS}
    if not card:
        answers.add(UNPROVEN)
        reasons.append(f"site={site.name} has no memory_gib: choose a site of conf/site, such as site=h100x8")
    elif need > card:
        answers.add(NO)
        reasons.append(f"a GPU needs {_gib(need)} of {_gib(card)}, margin included")
    elif need > CLOSE * card:
        answers.add(TIGHT)
        reasons.append(f"a GPU needs {_gib(need)} of {_gib(card)}, margin included")
    _judge_host(forecast, machine, answers, reasons)
    _judge_ranks(forecast, machine, answers, reasons)
    _judge_reach(forecast, machine, answers, reasons)
    answer = next(one for one in (NO, UNPROVEN, TIGHT, FITS) if one in answers)
    return Verdict(answer, reasons, need, card, forecast, round((site.host_memory_gib or 0) * GIB))


def _judge_host(forecast: Forecast, machine: Machine, answers: set[str], reasons: list[str]) -> None:
    host, there = forecast.host, machine.site.host_memory_gib
    needed = host.node_bytes
    if there is None:
        if host.kept_bytes or host.optimizer_bytes:
            answers.add(UNPROVEN)
            reasons.append(f"{_gib(needed)} of host memory a node: site.host_memory_gib is not known")
        return
    room = HOST_SHARE * there * GIB
    if needed > room:
        answers.add(NO)
        reasons.append(f"a node needs {_gib(needed)} of host memory, of {there:.0f} GiB")
    elif needed > CLOSE * room:
        answers.add(TIGHT)
        reasons.append(f"a node needs {_gib(needed)} of host memory, of {there:.0f} GiB")


def _judge_ranks(forecast: Forecast, machine: Machine, answers: set[str], reasons: list[str]) -> None:
    site, ranks = machine.site, int(forecast.run["ranks"])
    there = (site.nodes or 0) * (site.gpus_a_node or 0)
    if there and ranks > there:
        answers.add(NO)
        reasons.append(f"{ranks} ranks on {site.nodes} node(s) of {site.gpus_a_node} GPUs")


def _judge_reach(forecast: Forecast, machine: Machine, answers: set[str], reasons: list[str]) -> None:
    """How far measured runs reach. A measurement on as many ranks says nothing of a model of another size."""
    run, ranks = forecast.run, int(forecast.run["ranks"])
    if machine.site.device == "cpu":
        return
    nodes = -(-ranks // (machine.site.gpus_a_node or 8))
    unmeasured = not machine.calibrated(ranks)
    for beyond, words in (
        (unmeasured and int(run["sp"]) > PROVEN_SP, f"parallel.sp={run['sp']} is above {PROVEN_SP}"),
        (unmeasured and nodes > PROVEN_NODES, f"{nodes} nodes are more than {PROVEN_NODES}"),
        (
            int(run["parameters"]) > PROVEN_PARAMETERS,
            f"{int(run['parameters']) / 1e9:.0f} billion parameters are above 30",
        ),
    ):
        if beyond:
            answers.add(UNPROVEN)
            reasons.append(f"{words}: published runs there needed up to a quarter more than forecast")


def gate(
    cfg: RunConfig, world: int, calibration: str | None = None, documents: tuple[int, ...] | None = None
) -> Verdict:
    """The verdict before a launch, in well under a second, without torch. world: ranks of the run.

    Call it with the configuration of the run and `cfg.cluster.nodes x ranks a node` for `world`; refuse to submit where
    `.refuses(cfg.plan.gate)`, print `.reasons` otherwise. Under site=auto nothing is known of the machine and the answer is
    `unproven`. Raises ConfigError for a model that the closed form does not know.
    """
    machine = read_machine(cfg.site, calibration)
    return verdict(plan(cfg, world, machine, documents), machine)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
