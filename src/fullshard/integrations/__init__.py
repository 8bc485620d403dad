"""Fullshard in programs written for other libraries: `adopt` puts it in the place of PyTorch's own."""
