"""Fullshard in programs written for other libraries: `adopt` replaces PyTorch's FSDP."""

from ..insight import last_words

last_words.install()
