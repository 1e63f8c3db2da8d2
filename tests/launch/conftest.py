"""The example job is a script beside its neighbours: its folder goes on the path, as Python puts it for a script."""

from __future__ import annotations

import sys

from distclip.data import data_path

sys.path.insert(0, str(data_path("launch")))
