"""What a run is: schema.py (every setting, explained), compose.py (command line and files, the only user of Hydra),
convert.py and checks.py (every fault at once), derive.py (each derived number once).

To add a setting: one field with its docstring in `schema.py`, its range in `ranges.py`; where it hangs on others, a
check in `checks.py`. To add a choice: a YAML file in the group's folder under `conf/`. To add an experiment: a file in
`conf/exp/` that begins with `# @package _global_` and holds differences only. Nothing here imports torch.
"""
