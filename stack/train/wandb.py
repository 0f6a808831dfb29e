"""Weights & Biases: the same numbers as in the journal. One run a job, from rank 0; no trouble of it stops training.

All calls are made on a thread of their own, fed by a queue, so a server that hangs keeps nobody waiting.

W&B 0.31 keeps an offline run's last 32 KiB in memory until the run finishes: a killed process takes them along. So
`wandb.json` in the run folder notes the run's id and how far the starts that *finished* have brought it. The next start
of the job goes on under the same id, removes the offline files of starts that did not finish, and sends the missing
steps again from the journal. In the end each step is there once, by our own `step`, which is the x axis of all charts.
"""

from __future__ import annotations

import json
import netrc
import os
import queue
import shutil
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stack.checkpoint.state import TrainState
from stack.config.schema import LogConfig
from stack.train.folder import write_whole

FINISH_S = (
    60.0  # how long the end of a run waits for what is not uploaded yet; `wandb sync` can send it later
)
GRACE_S = 10.0  # and how much longer its own call may take to notice


@dataclass
class WandbMemory:
    """What a restart has to know."""

    run_id: str
    last_step: int = 0
    """Everything up to here was kept by starts that finished."""
    finished: list[str] = field(default_factory=list)
    """Names, below `wandb`, of the offline files of starts that finished."""

    @classmethod
    def recall(cls, path: Path, resume_step: int, tell: Callable[[str], None]) -> WandbMemory:
        """Of the starts before, if the run is resumed; a fresh start is a run of its own."""
        memory = cls._read(path, tell) if path.exists() else None
        if memory is not None:
            for left in (path.parent / "wandb").glob(f"offline-run-*-{memory.run_id}"):
                if left.name not in memory.finished:  # an incomplete copy of the journal, which is sent again
                    try:
                        shutil.rmtree(left)
                    except OSError as error:
                        tell(
                            f"warning: {left} could not be removed: {error}; do not sync it, its steps come again"
                        )
        if memory is None or resume_step == 0:
            memory = cls(uuid.uuid4().hex[:8])
        try:
            memory.store(path)
        except OSError as error:
            tell(f"warning: {path} cannot be written ({error}); a restart will be another run to W&B")
        return memory

    @classmethod
    def _read(cls, path: Path, tell: Callable[[str], None]) -> WandbMemory | None:
        try:
            memory = cls(**json.loads(path.read_text(encoding="utf-8")))
            if (
                isinstance(memory.run_id, str)
                and isinstance(memory.last_step, int)
                and isinstance(memory.finished, list)
            ):
                return memory
            cause = "its values are none that this program writes"
        except (OSError, ValueError, TypeError) as error:
            cause = f"{type(error).__name__}: {error}"
        tell(f"warning: {path} cannot be read ({cause}); from here on it is another run to W&B")
        return None

    def store(self, path: Path) -> None:
        write_whole(path, json.dumps(asdict(self)))


class WandbHook:
    """Sends each step's record. Rank 0 only."""

    def __init__(
        self,
        log: LogConfig,
        mode: str,
        name: str,
        folder: Path,
        config: dict[str, Any],
        earlier: list[dict[str, Any]],
        tell: Callable[[str], None],
    ):
        """mode: `online` or `offline`. folder: of the run. earlier: the journal up to where the run is resumed."""
        self._mode, self._tell, self._path = mode, tell, folder / "wandb.json"
        self._memory = WandbMemory.recall(self._path, earlier[-1]["step"] if earlier else 0, tell)
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        for record in earlier:
            self._queue.put(record)
        self._settings = {
            "project": log.project,
            "entity": log.entity,
            "tags": log.tags,
            "name": name,
            "id": self._memory.run_id,
            "dir": str(folder),
            "config": config,
        }
        # A daemon: a call that never returns must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def after_step(self, state: TrainState, record: dict[str, Any]) -> None:
        self._queue.put(dict(record))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(FINISH_S + GRACE_S)
        if self._thread.is_alive():
            self._tell("warning: W&B did not finish in time; the run's numbers are in metrics.jsonl")

    def _work(self) -> None:
        exit_code = 0
        try:
            self._send()
        except BaseException as error:  # noqa: BLE001  W&B raises what it likes, SystemExit too; training goes on
            self._tell(
                f"warning: W&B stopped ({error!r}); training goes on without it. The run's numbers are in "
                "metrics.jsonl, from where its next start sends what W&B lacks"
            )
            exit_code = 1  # W&B must not show it as finished
        # Not left to the exit of the program: where W&B's process is gone, a traceback would stand behind our last line.
        with suppress(BaseException):
            import wandb

            wandb.teardown(exit_code=exit_code)

    def _send(self) -> None:
        run, last_step = self._start()
        while (record := self._queue.get()) is not None:
            if record["step"] > last_step:
                last_step = record["step"]
                run.log({key: value for key, value in record.items() if value is not None}, step=last_step)
        run.finish()
        self._memory.last_step = last_step
        self._memory.finished.append(Path(run.dir).parent.name)
        self._memory.store(self._path)

    def _start(self) -> tuple[Any, int]:
        """The run, and the last step that W&B has already."""
        import wandb

        # A service that runs for a process above this one may still hold this run open for a start that was killed.
        os.environ.pop("WANDB_SERVICE", None)
        settings = wandb.Settings(console="off", silent=True, init_timeout=60, finish_timeout=FINISH_S)
        if self._mode == "online":
            try:
                run = wandb.init(mode="online", resume="allow", settings=settings, **self._settings)
                last_step = run.step - 1  # of the server's: the next step comes behind it
            except Exception as error:  # noqa: BLE001  no network, a wrong key, ...: keep the numbers on disk
                self._tell(
                    f"warning: W&B is not reachable ({type(error).__name__}: {error}); logging offline"
                )
                self._mode = "offline"
        if self._mode == "offline":
            run = wandb.init(mode="offline", settings=settings, **self._settings)
            last_step = self._memory.last_step
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run, last_step


def wandb_mode(log: LogConfig, environ: Mapping[str, str]) -> str:
    """`online`, `offline` or `disabled`. `auto` follows WANDB_MODE, else a key in the environment or from `wandb login`."""
    if log.wandb != "auto":
        return log.wandb
    given = environ.get("WANDB_MODE")
    if environ.get("WANDB_DISABLED", "").lower() in ("true", "1") or given == "disabled":
        return "disabled"
    if given:
        # dryrun is W&B's older word for offline.
        return "offline" if given in ("offline", "dryrun") else "online"
    return "online" if environ.get("WANDB_API_KEY") or _key_in_netrc(environ) else "offline"


def _key_in_netrc(environ: Mapping[str, str]) -> bool:
    host = urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return (
            netrc.netrc(environ.get("NETRC", os.path.expanduser("~/.netrc"))).authenticators(host) is not None
        )
    except (OSError, netrc.NetrcParseError):  # no such file, or one that W&B could not read either
        return False
