"""Copies of complete checkpoints at an address that fsspec knows (s3://, gs://, file://, memory://), behind the steps.

The manifest goes last and goes away first, so a copy with a manifest is complete. Trouble with the far side never ends a
run: it is said aloud and tried again, and in the end the local checkpoint is there.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec

from stack.checkpoint.manifest import FILE_NAME, parse_manifest, read_manifest, verify_files
from stack.errors import CheckpointError

ATTEMPTS = 5


class Uploader:
    """Copies one checkpoint at a time, on a thread of its own. One more may wait: the newest. If copying is slower than
    saving, those in between are left out, and said so."""

    def __init__(self, address: str, tell: Callable[[str], None], pause_s: float = 2.0):
        """pause_s: before the second attempt; each further pause is twice as long."""
        self.address, self._tell, self._pause_s = address.rstrip("/"), tell, pause_s
        self.current: Path | None = None
        """The checkpoint that is being copied; it must not be deleted."""
        self._waiting: Path | None = None
        self._change = threading.Condition()
        self._news = ""
        threading.Thread(target=self._run, name="upload", daemon=True).start()

    def put(self, folder: Path) -> None:
        """Copy this complete checkpoint as soon as the one before it is through."""
        with self._change:
            if self._waiting is not None:
                self._tell(
                    f"warning: {self._waiting.name} is not copied to {self.address}: copying is slower than saving"
                )
            self._waiting = folder
            self._change.notify_all()

    def busy(self) -> bool:
        """Whether something is to be copied still."""
        with self._change:
            return self.current is not None or self._waiting is not None

    def wait(self, limit_s: float) -> None:
        """Until nothing is to be copied any more; at the limit, a line on how far it is."""
        with self._change:
            if not self._change.wait_for(lambda: self.current is None and self._waiting is None, limit_s):
                self._tell(f"still copying: {self._news}")

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting is not None)
                self.current, self._waiting = self._waiting, None
            assert self.current is not None
            self._copy(self.current)
            with self._change:
                self.current = None
                self._change.notify_all()

    def _copy(self, folder: Path) -> None:
        target, done = f"{self.address}/{folder.name}", set[str]()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                upload(folder, target, done, self._note)
                self._tell(f"{folder.name} is copied to {target}")
                return
            except Exception as error:  # noqa: BLE001  each store raises errors of its own
                cause = f"{type(error).__name__}: {error}"
            if attempt < ATTEMPTS:
                pause = self._pause_s * 2 ** (attempt - 1)
                self._tell(
                    f"warning: copying {folder.name} to {target} failed ({cause}); attempt {attempt + 1} of {ATTEMPTS} in {pause:.0f} s"
                )
                threading.Event().wait(pause)
        self._tell(
            f"warning: {folder.name} is not copied to {target} after {ATTEMPTS} attempts ({cause}). It is complete in {folder}; "
            f"training goes on. Fix: mend the store, and copy it by hand, {FILE_NAME} last"
        )

    def _note(self, text: str) -> None:
        self._news = text


def open_address(address: str) -> tuple[Any, str]:
    """The file system, and the path in it."""
    options = {"auto_mkdir": True} if address.startswith(("file://", "local://")) else {}
    fs, path = fsspec.core.url_to_fs(address, **options)
    fs.invalidate_cache()  # what was listed before may be gone
    return fs, path.rstrip("/")


def upload(folder: Path, address: str, done: set[str], note: Callable[[str], None]) -> None:
    """Copy a complete checkpoint, its manifest last. What is there already is left as it is.

    done: names that earlier attempts have copied; grows. note: is told how far it is. Raises whatever the store does, or
    CheckpointError if a file did not arrive whole.
    """
    manifest = read_manifest(folder)
    fs, target = open_address(address)
    if fs.exists(f"{target}/{FILE_NAME}"):
        if fs.cat_file(f"{target}/{FILE_NAME}") == (folder / FILE_NAME).read_bytes():
            return
        fs.rm_file(f"{target}/{FILE_NAME}")  # of an older one of the same step: not complete from here on
    total = sum(manifest.files.values())
    for name, size in manifest.files.items():
        copied = sum(manifest.files[other] for other in done)
        note(f"{folder.name} to {address}, {copied / 1e9:.3f} of {total / 1e9:.3f} GB")
        if name not in done:
            fs.put_file(str(folder / name), f"{target}/{name}")
            if (arrived := fs.size(f"{target}/{name}")) != size:
                raise CheckpointError(f"{name} has {arrived} bytes at {address}, and {size} here")
            done.add(name)
    fs.put_file(str(folder / FILE_NAME), f"{target}/{FILE_NAME}")


def download(address: str, folder: Path) -> Path:
    """Fetch a complete checkpoint from `address` (such as s3://BUCKET/FOLDER/RUN_NAME/step_000100) into `folder`, which is complete or absent. Returns `folder`.

    Raises CheckpointError if there is none, or if what arrives is not what was saved.
    """
    if folder.exists():
        raise CheckpointError(
            f"{folder} exists: it is not overwritten. Fix: name a folder that does not exist"
        )
    fs, source = open_address(address)
    if not fs.exists(f"{source}/{FILE_NAME}"):
        raise CheckpointError(f"there is no complete checkpoint at {address}: it has no {FILE_NAME}")
    text = fs.cat_file(f"{source}/{FILE_NAME}").decode()
    part = folder.with_name(f"{folder.name}.partial")
    try:
        manifest = parse_manifest(text)
        shutil.rmtree(part, ignore_errors=True)
        for name in manifest.files:
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(f"{source}/{name}", str(part / name))
    except (ValueError, TypeError, OSError) as error:
        raise CheckpointError(f"the checkpoint at {address} cannot be fetched: {error}") from error
    verify_files(part, manifest)
    (part / FILE_NAME).write_text(text, encoding="utf-8")
    part.rename(folder)
    return folder
