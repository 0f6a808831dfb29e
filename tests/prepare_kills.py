"""Kills preparation at random moments, again and again, and holds what it ends with to an unbroken run's store:

    python tests/prepare_kills.py --kills 50 --seed 2

Each time kill -9 hits the whole group, the main process alone, whose workers must then end by themselves, or one
worker, which must end in one clear error. The tokenizer is trained in the same run, so that its moments are hit too. A
small number of kills is in the test suite.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import psutil  # noqa: E402

CHILD = """
import sys
from stack.config.schema_data import DataConfig
from stack.data import build
from stack.data.prepare import ensure_store

if __name__ == "__main__":
    build.LEAST_UNIT = 1 << 16
    data = DataConfig(source="jsonl", path=sys.argv[1], store=sys.argv[2], train_tokenizer=True, vocab_size=2000)
    data.prepare_workers = int(sys.argv[3])
    ensure_store(data, tokenizer_path=None, model_vocab=None, seed=1)
"""


class Broken(Exception):
    """Something that a kill must not do."""


def start(folder: Path, workers: int) -> subprocess.Popen[str]:
    """The preparation, leader of a session of its own."""
    script = folder / "child.py"
    script.write_text(CHILD)
    command = [sys.executable, str(script), str(folder / "corpus.jsonl"), str(folder / "store"), str(workers)]
    env = os.environ | {"PYTHONPATH": str(REPO)}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def members(session: int) -> list[psutil.Process]:
    """Living processes of a session."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def kill(child: subprocess.Popen[str], how: str, choice: random.Random) -> None:
    """kill -9 on all, on the main process, or on one that it started."""
    others = [process for process in members(child.pid) if process.pid != child.pid]
    if how == "group":
        os.killpg(child.pid, signal.SIGKILL)
    elif how == "worker" and others:
        os.kill(choice.choice(others).pid, signal.SIGKILL)
    else:
        child.kill()


def wait_for_all(child: subprocess.Popen[str], timeout_s: float = 60.0) -> str:
    """What it printed, once every process of the session has ended."""
    output, _ = child.communicate(timeout=timeout_s)
    end = time.monotonic() + timeout_s
    while living := members(child.pid):
        if time.monotonic() > end:
            raise Broken(f"{len(living)} processes live on behind their main process: {living}")
        time.sleep(0.02)
    return output


def digest(store: Path) -> str:
    """Of every file of the one finished store, and of nothing beside it but its lock."""
    folders = [path for path in store.iterdir() if path.is_dir()]
    if len(folders) != 1 or folders[0].suffix == ".partial":
        raise Broken(f"one store was expected, there are {[path.name for path in folders]}")
    total = hashlib.sha256(folders[0].name.encode())
    for path in sorted(path for path in folders[0].rglob("*") if path.is_file()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(folders[0])} {content}\n".encode())
    return total.hexdigest()


def run_kills(kills: int, seed: int, folder: Path, workers: int = 2, kib: int = 2048) -> str:
    """Raises Broken where a store differs, a process lives on, or a run that was left alone fails."""
    from tests.prepare_speed import write_corpus

    choice = random.Random(seed)
    write_corpus(folder / "corpus.jsonl", kib << 10)
    begin = time.monotonic()
    first = start(folder, workers)
    output = wait_for_all(first, 600)
    length = time.monotonic() - begin
    if first.returncode:
        raise Broken(f"the unbroken run ended with {first.returncode}:\n{output}")
    expected = digest(folder / "store")
    done = finished = hit = 0
    shutil.rmtree(folder / "store")
    while done < kills or finished == 0 or (folder / "store").exists():
        child = start(folder, workers)
        how = choice.choice(["group", "main", "worker"])
        try:
            child.wait(choice.uniform(0.0, length) if done < kills else 600)
        except subprocess.TimeoutExpired:
            kill(child, how, choice)
            done += 1
        output = wait_for_all(child, 600)
        hit += child.returncode != 0
        if child.returncode == 0:
            if digest(folder / "store") != expected:
                raise Broken(f"the store differs from the unbroken run's after {done} kills (seed {seed})")
            finished += 1
            shutil.rmtree(folder / "store")
        elif child.returncode > 0 and "ended with code -9" not in output:
            raise Broken(f"a run ended with {child.returncode} and no word of its killed worker:\n{output}")
    return f"{done} kills, {hit} of them before the end; {finished} stores finished, all equal to the unbroken one"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kib", type=int, default=2048, help="size of the corpus in KiB")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(run_kills(given.kills, given.seed, Path(folder), given.workers, given.kib))


if __name__ == "__main__":
    main()
