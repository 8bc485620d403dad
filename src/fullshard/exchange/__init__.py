"""Checkpoints between formats: which one is at a path, conversion of any into any other, what is in one."""
