"""The forecast held to what others have published. `published.csv`: measurements with source, URL and how each was read.
`jobs.py`, `layers.py`, `systems.py`: the settings, layers and steps of those systems; `published.py`: rows to plans, and the
errors.

    python -m tests.plan.published [FILE.csv]
"""
