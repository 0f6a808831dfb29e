"""Changes to a plain model or batch from outside. `apply.py` holds the one ordered list.

To add a parallelism: a file here, its degree in `config/schema.py`, its axis in `dist/topology.py`, one call in
`apply.py`, one check in `config/checks.py`, and a row in the parity table (`tests/parity`).
"""
