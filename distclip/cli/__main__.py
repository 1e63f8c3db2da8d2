"""`python -m distclip.cli`: the `distclip` command without its script."""

from __future__ import annotations

import sys

from distclip.cli import main

sys.exit(main())
