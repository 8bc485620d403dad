"""Why a run hung or died, from what its watchers and PyTorch's flight recorder left on disk."""

from .diagnosis import Diagnosis, doctor

__all__ = ["Diagnosis", "doctor"]
