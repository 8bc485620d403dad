"""`python -m fullshard.cli`."""

import sys

from .main import main

sys.exit(main())
