from __future__ import annotations

from pathlib import Path

import pytest

import distclip.data
from distclip.data import NAMES, data_path
from distclip.errors import DistclipError


@pytest.mark.parametrize("name", NAMES)
def test_in_the_checkout(name):
    assert data_path(name) == Path(__file__).parents[1] / name


def test_the_wheel_comes_first(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "distclip"
    (package / "_data" / "launch").mkdir(parents=True)
    monkeypatch.setattr(distclip.data, "_PACKAGE", package)
    assert data_path("launch") == package / "_data" / "launch"


def test_a_folder_beside_an_installed_package_is_somebody_elses(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "distclip"
    package.mkdir(parents=True)
    (tmp_path / "site-packages" / "launch").mkdir()
    monkeypatch.setattr(distclip.data, "_PACKAGE", package)
    with pytest.raises(DistclipError, match=r"launch folder .* missing .*_data/launch.*install distclip again"):
        data_path("launch")


def test_an_unknown_name():
    with pytest.raises(ValueError, match="'docs': expected one of launch, monitoring"):
        data_path("docs")
