"""From a folder or hub name to a folder on this machine, within seconds when there is no network.

huggingface_hub alone retries for 23 s a file on a machine without a network; here the network is asked for once.
"""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from stack.dist.network import hub_reachable
from stack.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def is_folder(path: str) -> bool:
    """Whether `path` is a model folder on this machine, rather than a hub name."""
    return (Path(path).expanduser() / "config.json").is_file()


def fetch(path: str, weights: bool) -> Path:
    """Folder of `path`, downloaded to the hub's cache where needed: config files, and with `weights` the safetensors.

    Raises ModelError that names the cause: no such folder, no network, no access, no safetensors.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() or _is_file_path(path):
        if not (folder / "config.json").is_file():
            problem = "has no config.json" if folder.is_dir() else "does not exist"
            raise ModelError(f"model.path={path!r}: the folder {folder.absolute()} {problem}")
        return folder
    found = _download(path, "config.json")
    assert found is not None
    _download(path, "generation_config.json", optional=True)
    if weights:
        for name in _weight_files(path):
            _download(path, name)
    return found.parent


def _weight_files(path: str) -> list[str]:
    index = _download(path, INDEX, optional=True)
    if index is None:
        return [SINGLE]
    return sorted(set(json.loads(index.read_text())["weight_map"].values()))


def _download(path: str, name: str, optional: bool = False) -> Path | None:
    try:
        return Path(hf_hub_download(path, name, local_files_only=True))
    except LocalEntryNotFoundError:
        pass  # not in the cache: ask the network
    except HFValidationError as error:
        raise ModelError(f"model.path={path!r} is neither a folder here nor a hub name: {error}") from error
    if not hub_reachable():
        if optional:
            return None
        raise ModelError(
            f"model.path={path!r}: {name} is neither in the folder nor in the hub cache ({constants.HF_HUB_CACHE}), and "
            f"{constants.ENDPOINT} cannot be reached. Fix: copy the model's folder here and give it as model.path, or "
            f"download it on a machine with a network (`hf download {path}`) and set HF_HOME; to train from scratch, "
            "model.init=scratch"
        )
    try:
        return Path(hf_hub_download(path, name))
    except EntryNotFoundError as error:
        if optional:
            return None
        raise ModelError(f"model.path={path!r} has no {name} on {constants.ENDPOINT}") from error
    except GatedRepoError as error:
        raise ModelError(
            f"model.path={path!r} is gated: accept its licence on {constants.ENDPOINT}/{path} and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"model.path={path!r}: no folder here and no model of that name on {constants.ENDPOINT}"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"model.path={path!r}: downloading {name} failed: {error}") from error


def _is_file_path(path: str) -> bool:
    """A hub name is `name` or `owner/name`; anything else can only be a folder."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or "\\" in path
