"""distclip: correct gradient clipping for distributed PyTorch."""

from __future__ import annotations

__version__ = "0.1.0"
