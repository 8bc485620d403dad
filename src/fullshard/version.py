"""The version of Fullshard, which checkpoints record."""

VERSION = "0.1.0"
