"""One run: its composition, its loop, and what watches it.

`run.py` puts the parts together from top to bottom; `loop.py` holds the step; hooks (`hooks.py`, `console.py`,
`journal.py`, `wandb.py`) get each step's numbers and may watch and save, never change weights, loss or data.

To add a hook: a class with `after_step(state, record)` and `close()`, and a line in `run.py::build_hooks`.
"""
