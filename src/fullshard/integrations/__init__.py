"""Fullshard in programs written for other libraries: `adopt` replaces PyTorch's FSDP."""
