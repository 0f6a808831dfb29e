"""Ranks, groups and collectives: who am I, with whom do I share a row, and how do tensors move between us."""
