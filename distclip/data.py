"""Where the files are that distclip ships beside its code: the `launch` and `monitoring` folders.

A wheel carries them inside the package, under `distclip/_data/`. An editable install has only the checkout they are
written in, where they lie beside the package. `data_path` is the one place that knows.
"""

from __future__ import annotations

from pathlib import Path

from distclip.errors import DistclipError

NAMES = ("launch", "monitoring")
"""The folders that travel as data."""

_PACKAGE = Path(__file__).resolve().parent


def data_path(name: str) -> Path:
    """Return the folder `name` ("launch" or "monitoring"), from the wheel's data or else from the checkout.

    Raises:
        ValueError: `name` is not one of `NAMES`.
        DistclipError: the folder is in neither place; the installation is incomplete.

    Example:
        >>> (data_path("monitoring") / "prometheus" / "rules").is_dir()
        True
    """
    if name not in NAMES:
        raise ValueError(f"unknown data folder {name!r}: expected one of {', '.join(NAMES)}")
    candidates = [_PACKAGE / "_data" / name]
    # A checkout is known by its pyproject.toml: a folder called "launch" beside an installed package is not ours.
    if (_PACKAGE.parent / "pyproject.toml").is_file():
        candidates.append(_PACKAGE.parent / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    looked = " and ".join(str(candidate) for candidate in candidates)
    raise DistclipError(f"the {name} folder of distclip is missing (looked in {looked}): install distclip again")
