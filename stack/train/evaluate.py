"""Loss on held-out rows: the mean over all their targets, the same number for any split into ranks and batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from stack.data.batch import MicroBatch
from stack.dist.topology import Topology


def evaluate(
    engine: Any,
    method: Any,
    rows: Iterable[MicroBatch],
    topology: Topology,
    wish: Callable[[], bool] = lambda: False,
) -> dict[str, float | int] | None:
    """Collective. `eval_loss` in nats a target, `eval_perplexity`, `eval_targets`.

    rows: this rank's micro-batches, slices of rows, as many on every rank: one without a row gets one without targets.
    wish: whether this rank has been asked to stop the run; if any has, all drop the evaluation between two micro-batches
    and None is returned. Weights, training data and random states are not touched.
    """
    loss_sum_local, targets_local = 0.0, 0
    for batch in rows:
        if topology.sum(int(wish())):
            return None
        loss_sum_local += float(engine.evaluate(method, batch))
        targets_local += method.count_targets(batch)
    targets = topology.sum(targets_local)
    # The sum of all slices over the targets of all rows, counted once: no mean of means.
    loss = topology.sum(loss_sum_local) / targets if targets else math.nan
    perplexity = math.exp(min(loss, 700.0))  # exp overflows beyond 709
    return {"eval_loss": loss, "eval_perplexity": perplexity, "eval_targets": targets}
