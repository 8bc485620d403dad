"""The version of Fullshard, which checkpoints say."""

VERSION = "0.1.0"
