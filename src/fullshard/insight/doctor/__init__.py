"""Why a run hung or died, from the files that its watchers and PyTorch's flight recorder wrote."""

from .diagnosis import Diagnosis, doctor

__all__ = ["Diagnosis", "doctor"]
