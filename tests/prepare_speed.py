"""Preparation against `datasets.map` on this machine, in one run: speed, memory, and time for twice the text.

    python -m tests.prepare_speed --mib 1024 --workers 2
    python -m tests.prepare_speed --mib 200 --workers 2 --one-line

The corpus is JSON Lines made of the standard library's own files, again and again, each time with other words strewn in, so
that no cache of words is told the same twice. Both take the same file and the same tokenizer with as many processes,
and each contender runs in processes of its own. `datasets.map` is timed alone, from text that `load_dataset` has
already brought to Arrow; what that took is given beside. Not part of the test suite: it judges by the clock.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

BASE_MIB, WORKER_MIB = 600, 150
"""What preparation may take in memory: this, and this for each worker."""


def write_corpus(path: Path, num_bytes: int) -> None:
    """Documents as the library has them, some 16 KB each, and salt: a word of its own behind every 20th line."""
    from stack.config.schema_data import DataConfig
    from stack.data.sources import SOURCES, SourceRequest, Tally, all_documents

    source = SOURCES["stdlib"](SourceRequest(DataConfig(), 1, 1))
    texts = ["".join(map(str, one.blocks())) for one in all_documents(source, Tally("skip"))]
    written = 0
    with path.open("w") as file:
        for turn in range(1 << 30):
            for number, text in enumerate(texts):
                salt = random.Random(f"{turn} {number}")
                lines = text.splitlines(keepends=True)
                lines[::20] = [f"{salt.getrandbits(40):x} {line}" for line in lines[::20]]
                written += file.write(json.dumps({"id": number, "text": "".join(lines)}) + "\n")
                if written >= num_bytes:
                    return


def write_line(path: Path, num_bytes: int) -> None:
    """The same text as one document of one line."""
    lines = path.with_suffix(".jsonl")
    write_corpus(lines, num_bytes)
    with lines.open() as file, path.open("w") as out:
        for line in file:
            out.write(" ".join(json.loads(line)["text"].split("\n")) + " ")


def train(folder: Path) -> None:
    """A tokenizer of 16,384 tokens on a part of the library."""
    from stack.config.schema_data import DataConfig
    from stack.data.sources import SOURCES, SourceRequest, Tally, all_documents
    from stack.data.tokenizer import train_tokenizer

    source = SOURCES["stdlib"](SourceRequest(DataConfig(), 1, 1))
    documents = list(all_documents(source, Tally("skip")))[::4]
    train_tokenizer(("".join(map(str, one.blocks())) for one in documents), 16_384).save_pretrained(folder)


def run_ours(corpus: Path, tokenizer: Path, out: Path, workers: int) -> dict:
    from stack.config.schema_data import DataConfig
    from stack.data.prepare import ensure_store
    from stack.data.store import TokenStore

    source = "text" if corpus.suffix == ".txt" else "jsonl"
    data = DataConfig(source=source, path=str(corpus), store=str(out), prepare_workers=workers)
    begin = time.perf_counter()
    folder = ensure_store(data, tokenizer_path=str(tokenizer), model_vocab=None, seed=1, say=lambda _: None)
    return {"seconds": time.perf_counter() - begin, "tokens": TokenStore(folder).num_tokens}


def run_datasets(corpus: Path, tokenizer: Path, out: Path, workers: int) -> dict:
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    begin = time.perf_counter()
    text = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(out))
    loaded = time.perf_counter()
    loader = AutoTokenizer.from_pretrained(tokenizer)
    done = text.map(
        lambda rows: {"input_ids": loader([row + loader.eos_token for row in rows["text"]])["input_ids"]},
        batched=True,
        num_proc=workers or None,
        remove_columns=text.column_names,
    )
    seconds = time.perf_counter() - loaded
    tokens = sum(len(batch["input_ids"].flatten()) for batch in done.data.to_batches())
    return {"seconds": seconds, "load_seconds": loaded - begin, "tokens": tokens}


CONTENDERS = {"ours": run_ours, "datasets": run_datasets}


def measure(name: str, corpus: Path, tokenizer: Path, out: Path, workers: int) -> dict:
    """Run a contender in a process of its own; its figures and the most memory that it and its children held at once."""
    command = [sys.executable, "-m", "tests.prepare_speed", "--contender", name]
    command += ["--paths", str(corpus), str(tokenizer), str(out), "--workers", str(workers)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    peak = [0]

    def watch() -> None:
        while child.poll() is None:
            peak[0] = max(peak[0], tree_rss(child.pid))
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, _ = child.communicate()
    watcher.join()
    if child.returncode:
        sys.exit(f"{name} ended with {child.returncode}")
    return json.loads(output.splitlines()[-1]) | {"peak_mib": peak[0] >> 20}


def cpu_seconds() -> float:
    """Of this process and the children that have ended, start included: what it took whatever else the machine did."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in found)


def tree_rss(pid: int) -> int:
    """Resident bytes of a process and all below it. Pages that they share count for each."""
    total = 0
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in family:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def compare(mib: int, workers: int, one_line: bool, folder: Path) -> dict:
    """All figures. The half corpus is the first half of the whole one."""
    suffix, write = ("txt", write_line) if one_line else ("jsonl", write_corpus)
    half, whole, tokenizer = folder / f"half.{suffix}", folder / f"whole.{suffix}", folder / "tokenizer"
    train(tokenizer)
    write(half, mib << 19)
    write(whole, mib << 20)
    ours_half = measure("ours", half, tokenizer, folder / "ours_half", workers)
    ours = measure("ours", whole, tokenizer, folder / "ours", workers)
    limit = BASE_MIB + WORKER_MIB * workers
    growth = ours["seconds"] / ours_half["seconds"]
    figures = {
        "corpus_mib": mib,
        "workers": workers,
        "ours_half": ours_half,
        "ours": ours,
        "tokens_per_s": round(ours["tokens"] / ours["seconds"]),
        "time_for_twice_the_text": round(growth, 3),
        "cpu_time_for_twice_the_text": round(ours["cpu_s"] / ours_half["cpu_s"], 3),
        "limit_mib": limit,
    }
    holds = {"memory": ours["peak_mib"] <= limit, "linear, 1.9 to 2.1": 1.9 <= growth <= 2.1}
    if not one_line:  # which `datasets` would take to the tokenizer whole
        theirs = measure("datasets", whole, tokenizer, folder / "datasets", workers)
        if ours["tokens"] != theirs["tokens"]:
            sys.exit(f"{ours['tokens']} tokens against {theirs['tokens']}: the two do not do the same work")
        figures["datasets_map"] = theirs
        figures["ratio_of_tokens_per_s"] = round(theirs["seconds"] / ours["seconds"], 3)
        figures["ratio_of_tokens_per_cpu_s"] = round(theirs["cpu_s"] / ours["cpu_s"], 3)
        with_loading = theirs["seconds"] + theirs["load_seconds"]
        figures["ratio_with_loading"] = round(with_loading / ours["seconds"], 3)
        holds["speed at least 1.0"] = theirs["seconds"] >= ours["seconds"]
    return figures | {"holds": holds}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the corpus in MiB")
    parser.add_argument("--workers", type=int, default=2, help="processes of both; 0: none")
    parser.add_argument(
        "--one-line", action="store_true", help="one document of one line, without a baseline"
    )
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--paths", nargs=3, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contender:
        found = CONTENDERS[given.contender](*given.paths, given.workers)
        print(json.dumps(found | {"cpu_s": round(cpu_seconds(), 1)}))
        return
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(compare(given.mib, given.workers, given.one_line, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
