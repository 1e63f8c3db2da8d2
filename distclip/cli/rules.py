"""Prometheus rules with shortened times, for a demo or a test that cannot wait ten minutes for an alert.

The rules in `monitoring/prometheus/rules/` hold every duration in one of three forms: `for: 5m`, a range `[10m]`, or
`offset 10m`; a number in an expression is never a time. So their text can be shortened without parsing PromQL or YAML.
"""

from __future__ import annotations

import re
from pathlib import Path

from distclip.data import data_path

_MILLISECONDS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(?P<before>\bfor: |\[|\boffset )(?P<number>\d+)(?P<unit>ms|s|m|h|d)\b")


def rule_files() -> list[Path]:
    """Return the rule files that ship with distclip, sorted by name."""
    return sorted((data_path("monitoring") / "prometheus" / "rules").glob("*.yaml"))


def shorten(text: str, *, factor: float, floor: float) -> str:
    """Return the text of a rule file with every duration multiplied by `factor`, but none below `floor` seconds.

    A duration that is shorter than the floor already stays as it is. The floor keeps ranges long enough to hold a few
    scrapes: take at least four scrape intervals. Comments and all else stay as they are.

    Args:
        text: a rule file, with its durations as `for: 5m`, `[10m]` or `offset 10m`.
        factor: above 0, at most 1.
        floor: seconds, not negative.

    Raises:
        ValueError: `factor` or `floor` is out of range.

    Example:
        >>> shorten("expr: increase(x[10m]) > 0\\nfor: 5m", factor=1 / 30, floor=15)
        'expr: increase(x[20s]) > 0\\nfor: 15s'
    """
    if not 0 < factor <= 1:
        raise ValueError(f"factor must be above 0 and at most 1, not {factor}")
    if not floor >= 0:
        raise ValueError(f"floor must be seconds of at least 0, not {floor}")

    def shorter(match: re.Match[str]) -> str:
        before = int(match["number"]) * _MILLISECONDS[match["unit"]]
        after = min(before, max(round(before * factor), round(floor * 1000)))
        return match["before"] + (f"{after // 1000}s" if after % 1000 == 0 else f"{after}ms")

    return _DURATION.sub(shorter, text)
