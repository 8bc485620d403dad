"""Fullshard: fully sharded data parallel training for PyTorch."""
