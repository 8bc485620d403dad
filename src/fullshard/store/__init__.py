"""Checkpoints on disk: saved on any number of ranks, loaded on any other, converted from and to other formats."""
