"""The answer to `--help`. Hydra's own takes over a second: it copies its whole repository for every group listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

USAGE = """\
Train a language model on long sequences.

  deepspeed launch/train.py +exp=NAME [group=choice ...] [setting=value ...]

e.g. deepspeed launch/train.py +exp=qwen3_1m parallel.sp=4 optim.lr=1e-5 model=llama3_8b
What the command line says wins over the experiment. Every setting is explained in stack/config/schema.py.

  --cfg job             shows the settings that a command would run with
  --info defaults-tree  shows the files that they come from
  --config-dir FOLDER   adds a folder of your own, laid out like conf/
  --hydra-help          shows further flags
"""


def help_text(choices: Mapping[str, Sequence[str]], settings: str) -> str:
    """choices: of each group. settings: those of this command, as YAML."""
    groups = "\n".join(f"  {group + ':':<12} {', '.join(names)}" for group, names in choices.items())
    return f"{USAGE}\nGroups and their choices (exp is chosen with +exp=NAME):\n{groups}\n\nSettings:\n{settings}"
