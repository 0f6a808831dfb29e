"""What a run leaves behind for a person: the curve as a picture, and a summary of where everything is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display is needed, on a login node as little as in a job
import matplotlib.pyplot as plt

from stack.train.console import tell


def draw_curve(records: list[dict[str, Any]], path: Path, title: str) -> None:
    """Loss, held-out loss and learning rate over the steps, as PNG. Steps without a loss leave a gap."""
    figure, axis = plt.subplots(figsize=(9, 5), dpi=120)
    steps = [record["step"] for record in records]
    losses = [float("nan") if record.get("loss") is None else record["loss"] for record in records]
    axis.plot(steps, losses, linewidth=1.2, label="loss", color="tab:blue")
    held_out = [
        (record["step"], record["eval_loss"]) for record in records if record.get("eval_loss") is not None
    ]
    if held_out:
        axis.plot(
            *zip(*held_out, strict=True), marker="o", markersize=4, color="tab:red", label="held-out loss"
        )
    axis.set_xlabel("optimizer step")
    axis.set_ylabel("loss (nats a token)")
    axis.set_title(title)
    axis.grid(alpha=0.3)
    rate = axis.twinx()
    rate.plot(
        steps,
        [record.get("lr", float("nan")) for record in records],
        linewidth=0.8,
        color="tab:gray",
        alpha=0.6,
    )
    rate.set_ylabel("learning rate (grey)")
    axis.legend(loc="upper right")
    figure.tight_layout()
    try:
        figure.savefig(path)
    except OSError as error:
        tell(f"warning: the curve could not be written to {path}: {error}")
    plt.close(figure)


def summarize(
    records: list[dict[str, Any]], places: dict[str, Path], total_steps: int, wandb_offline: bool
) -> str:
    """A few lines for the end of the run.

    records: the journal. places: what there is, by label, such as {"curve": path}.
    """
    lines = [
        "",
        "The run is complete."
        if _last(records) >= total_steps
        else f"The run stopped at step {_last(records)}.",
    ]
    losses = [record["loss"] for record in records if record.get("loss") is not None]
    if losses:
        # One step may hold one row, whose loss says more of the row than of the model.
        recent = losses[-10:]
        lines.append(
            f"  loss          {losses[0]:.4f} at the first step, {sum(recent) / len(recent):.4f} over the last "
            f"{len(recent)} of {_last(records)} steps"
        )
    held_out = [record for record in records if record.get("eval_loss") is not None]
    if held_out:
        final = held_out[-1]
        lines.append(
            f"  held-out loss {final['eval_loss']:.4f}, perplexity {_number(final['eval_perplexity'])}, "
            f"{final['eval_targets']:,} tokens"
        )
    if records:
        lines += [_totals(records[-1]), *_data(records)]
    lines += [f"  {label:<13} {path}" for label, path in places.items()]
    lines += ["What to try next:", *_next_steps(places, wandb_offline)]
    return "\n".join(lines)


def _last(records: list[dict[str, Any]]) -> int:
    return records[-1]["step"] if records else 0


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _totals(record: dict[str, Any]) -> str:
    text = f"  tokens        {record['tokens_total']:,} read, {record['targets_total']:,} predicted"
    counted = [
        f"{record[key]} {label}"
        for key, label in (
            ("skipped_steps", "skipped for NaN or inf"),
            ("overflow_steps", "skipped by the loss scaler"),
            ("empty_steps", "without targets"),
            ("dropped_steps", "dropped or passed over (faults)"),
            ("small_steps", "of an incomplete last window"),
        )
        if record.get(key)  # a journal of an older version lacks some
    ]
    return text + (f"; steps: {', '.join(counted)}" if counted else "")


def _data(records: list[dict[str, Any]]) -> list[str]:
    """How long the steps waited for rows, and what was drawn from each part of a mixture."""
    known = [
        record for record in records if "data_wait_s" in record
    ]  # a journal of an older version has none
    if not known:
        return []
    share = sum(record["data_wait_s"] for record in known) / sum(record["step_s"] for record in known)
    mixed = "tokens_total/"
    parts = [
        f"{tokens:,} from {key.removeprefix(mixed)}"
        for key, tokens in records[-1].items()
        if key.startswith(mixed)
    ]
    lines = [f"  data          {share:.2%} of the steps' time was waiting for rows"]
    return [*lines, f"{'':16}{', '.join(parts)}"] if parts else lines


def _next_steps(places: dict[str, Path], wandb_offline: bool) -> list[str]:
    steps = []
    if "model" in places:
        steps.append(
            f"  load it:        transformers.AutoModelForCausalLM.from_pretrained({str(places['model'])!r})"
        )
    if "checkpoints" in places:
        steps.append(
            "  go on longer:   the same command with more schedule.steps or schedule.epochs (resumes from the checkpoint)"
        )
    if wandb_offline:
        steps.append(f"  send to W&B:    wandb sync {places['run folder'] / 'wandb' / 'offline-run-*'}")
    steps.append(
        "  another run:    the same command with name=NEW_NAME and any override, such as optim.lr=1e-4"
    )
    return steps
