"""Checkpoints of all formats: detect the format at a path, convert between formats, inspect the contents."""
