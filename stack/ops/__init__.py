"""Tensor functions without groups of their own. Each fast one has its slow twin in `reference.py`."""
