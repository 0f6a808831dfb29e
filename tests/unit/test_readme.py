"""What README and the other documents name exists, and the commands they show compose."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stack.config.compose import compose_config
from stack.data.command import take_command
from stack.errors import ConfigError, Fault

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()
SHOWN = {
    "NAME": "tiny_cpu",
    "FOLDER": "texts",
    "FILE": "text.jsonl",
}  # what stands for a name of the reader's own


def commands() -> Iterator[str]:
    """Every command that README, an experiment or a launch file shows, from the launcher to the end of the overrides."""
    sources = [ROOT / "README.md", *(ROOT / "conf").rglob("*.yaml"), *(ROOT / "launch").rglob("*.*")]
    for source in (file for file in sources if file.is_file() and file.suffix != ".pyc"):
        for found in re.finditer(
            r"launch/(?:slurm/)?(?:train|prepare)\.(?:py|sbatch)((?: +\S+)*)", source.read_text()
        ):
            words = []
            for word in re.sub(r"[`\"].*", "", found[1]).split():
                if not re.match(r"^[+~]*[a-z_./]+=\S", word):
                    break
                words.append(word)
            if words and "[" not in found[1]:
                yield " ".join(words)


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_shown_overrides_compose(command: str) -> None:
    for shown, name in SHOWN.items():
        command = re.sub(rf"\b{shown}\b", name, command)
    faults: list[Fault] = []
    try:
        _, settings = take_command(shlex.split(command))  # launch/prepare.py has arguments of its own
        compose_config(settings)
    except ConfigError as error:
        faults = error.faults
    # The reader has the files that a command names, this machine does not.
    assert not [str(fault) for fault in faults if fault.key not in ("data.path", "model.path")]


def test_enough_commands_are_shown() -> None:
    found = set(commands())
    assert {"+exp=qwen3_1m", "+exp=quickstart"} <= found
    assert any("parallel.sp=4 optim.lr=1e-5" in command for command in found)


def test_named_files_exist() -> None:
    named = set(re.findall(r"(?:`|\()((?:stack|conf|tests|launch|ds_configs)/[\w./]+)[`)]", README))
    named |= {f"stack/{name}" for name in re.findall(r"^  ([a-z]+(?:/|\.py))  ", README, re.MULTILINE)}
    named |= set(re.findall(r"^([a-z_]+/) ", README, re.MULTILINE))
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / name).exists() and "NAME" not in name]


def test_every_folder_is_in_the_tree() -> None:
    folders = [path.name for path in (ROOT / "stack").iterdir() if (path / "__init__.py").exists()]
    assert not [name for name in folders if f"  {name}/ " not in README]


def test_named_make_targets_exist() -> None:
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)):
        ran = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
    assert {"train", "test", "check", "gpu-test"} <= set(re.findall(r"make ([a-z-]+)", README))


def test_experiments_are_in_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert not [file.stem for file in (ROOT / "conf" / "exp").glob("*.yaml") if file.stem not in changelog]
