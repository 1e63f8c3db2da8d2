"""Every code block in README.md and docs/ runs: Python as it is, in the order of its page; commands for real."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md"), ROOT / "CONTRIBUTING.md", ROOT / "monitoring/README.md"]
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RANKS = re.compile(r"# on (\d) ranks\n")


def _blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def test_every_block_says_its_language() -> None:
    known = {"python", "bash", "text", "json", "yaml", "promql"}
    for page in PAGES:
        found = {language for language, _ in BLOCK.findall(page.read_text())}
        assert found <= known, f"{page.name}: {found - known} would not be run"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page.stem}
    for number, block in enumerate(_blocks(page, "python")):
        if not RANKS.match(block):
            exec(compile(block, f"{page.name}[{number}]", "exec"), names)


def _on_ranks(block: str) -> None:
    exec(compile(block, "block", "exec"), {"__name__": "block"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs_on_ranks(page: Path, ranks: Any) -> None:
    for block in _blocks(page, "python"):
        marked = RANKS.match(block)
        if marked:
            ranks(_on_ranks, int(marked[1]), block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run(page: Path, tmp_path: Path) -> None:
    """`make` targets are shown to exist (they run this very test); all else is run in a copy of what it needs."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for block in _blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if not words:
                continue
            if words[0] == "make":
                subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
                continue
            result = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
            assert result.returncode == 0, f"{line}\n{result.stdout}{result.stderr}"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
