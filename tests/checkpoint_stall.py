"""How long the steps wait for a checkpoint, written at once and behind them, in one run on two CPU ranks:

    python -m tests.checkpoint_stall                     # 216 M parameters, AdamW in fp32: 2.6 GB a checkpoint
    python -m tests.checkpoint_stall --layers 2 --hidden 256 --saves 2

The two ways take turns, with real training steps between the saves. The first copy also takes the host memory that all
later ones use again, so it stands apart. Beside them, DeepSpeed's own call, which leaves the bytes in the page cache.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks

VOCAB, SEQ = 32000, 16
AT_ONCE, BEHIND = "at once", "behind"


def architecture(layers: int, hidden: int) -> dict[str, object]:
    return {
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": hidden // 16,
        "max_position_embeddings": SEQ,
        "tie_word_embeddings": False,
    }


class Bench:
    """An engine of this rank, a saver of each kind, and the seconds found."""

    def __init__(self, folder: str, layers: int, hidden: int):
        from stack.checkpoint.publish import Origin
        from stack.checkpoint.save import Saver
        from stack.checkpoint.state import TrainState
        from stack.config.schema_checkpoint import CheckpointConfig
        from tests.parity.steps_side import topology_of

        self.topology, self.state = topology_of(1), TrainState()
        self.engine, self.method, self.batch = make_engine(self.topology, layers, hidden)
        self.savers = {
            name: Saver(
                Path(folder) / name,
                self.topology,
                Origin(name, {"world": 2, "sp": 1, "stage": 3}, 99),
                CheckpointConfig(keep=1, asynchronous=name == BEHIND),
                lambda line: None,
            )
            for name in (AT_ONCE, BEHIND)
        }
        self.found: dict[str, list[float]] = {}

    def note(self, name: str, seconds: float) -> None:
        self.found.setdefault(name, []).append(seconds)

    def step(self, name: str) -> None:
        self.topology.barrier()
        begin = time.monotonic()
        self.engine.forward_backward(self.method, self.batch, 2 * self.batch.num_targets)
        self.engine.step(1e-5)
        self.state.step += 1
        self.note(name, time.monotonic() - begin)

    def save(self, name: str, label: str) -> None:
        saver = self.savers[name]
        self.step("step")
        self.topology.barrier()
        begin = time.monotonic()
        saver.save(self.engine, self.state)
        self.note(label, saver.take_stall_s())
        if name == BEHIND:
            self.step("step beside")
        saver.wait()
        self.note(f"published {label}", time.monotonic() - begin)

    def save_by_deepspeed(self, folder: str) -> None:
        inner, ours = self.engine._collector._inner, self.engine._collector
        self.engine._engine.checkpoint_engine = inner
        self.topology.barrier()
        begin = time.monotonic()
        self.engine._engine.save_checkpoint(folder, tag="deepspeed", save_latest=False)
        self.note("deepspeed", time.monotonic() - begin)
        self.engine._engine.checkpoint_engine = ours


def make_engine(topology: Any, layers: int, hidden: int) -> tuple[Any, Any, Any]:
    """Engine, method and one small batch."""
    from stack.config.schema import (
        DataConfig,
        EngineConfig,
        MethodConfig,
        ModelConfig,
        OptimConfig,
        RunConfig,
    )
    from stack.methods.pretrain import Pretrain
    from tests.parity.rank_side import assemble, pack
    from tests.parity.reference import Row

    cfg = RunConfig(
        model=ModelConfig(init="scratch", architecture=architecture(layers, hidden)),
        data=DataConfig(seq_len=SEQ),
        engine=EngineConfig(stage=3, precision="fp32"),
        optim=OptimConfig(name="adamw"),
    )
    batch = pack([Row([list(range(SEQ))], [[True] * SEQ])])
    return assemble(cfg, topology), Pretrain(MethodConfig()), batch


def measure(folder: str, layers: int, hidden: int, saves: int) -> dict[str, list[float]]:
    """Seconds of each save of each kind, on one rank, and the parameters and bytes."""
    bench = Bench(folder, layers, hidden)
    bench.step("first step")
    bench.save(BEHIND, "first copy")
    for _ in range(saves):
        bench.save(AT_ONCE, AT_ONCE)
        bench.save(BEHIND, BEHIND)
    bench.note("bytes", sum(path.stat().st_size for path in Path(folder, BEHIND).rglob("*.pt")))
    bench.note("parameters", sum(param.ds_numel for param in bench.engine.model.parameters()))
    bench.save_by_deepspeed(folder)
    bench.engine.close()
    return bench.found


def report(ranks: list[dict[str, list[float]]]) -> tuple[str, float]:
    """The slower rank counts in each save. Also the stall as a share of a save at once."""
    worst = {
        name: [max(values) for values in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }
    middle = {name: statistics.median(values) for name, values in worst.items()}
    single = {name: ", ".join(f"{value:.2f}" for value in values) for name, values in worst.items()}
    share = middle[BEHIND] / middle[AT_ONCE]
    lines = [
        f"{middle['parameters'] / 1e6:.0f} M parameters, {middle['bytes'] / 1e9:.2f} GB a checkpoint, 2 ranks; seconds, "
        "medians of the slower rank:",
        f"  written at once: the steps wait {middle[AT_ONCE]:.2f} ({single[AT_ONCE]})",
        f"  written behind:  the steps wait {middle[BEHIND]:.2f} ({single[BEHIND]}), the first time "
        f"{middle['first copy']:.2f}; published after {middle[f'published {BEHIND}']:.2f}",
        f"  that is {share:.1%}; DeepSpeed's own call, without fsync and checksums: {middle['deepspeed']:.2f}",
        f"  a step takes {middle['step']:.2f}, beside a write {middle['step beside']:.2f}",
    ]
    return "\n".join(lines), share


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--folder", help="on the disk to measure; a fresh one below it is used and removed")
    arguments = parser.parse_args()
    from tests.checkpoint_stall import measure  # not as a function of __main__, which the ranks do not have

    folder = tempfile.mkdtemp(prefix="checkpoint-stall-", dir=arguments.folder)
    try:
        settings = (arguments.layers, arguments.hidden, arguments.saves)
        print(report(run_ranks(measure, 2, folder, *settings, timeout_s=1500, init=False))[0])
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
