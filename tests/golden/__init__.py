"""One curve that many configurations must follow: `curve.json` is stored, `curve.py` says which, `make.py` makes it."""
