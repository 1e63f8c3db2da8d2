"""The wheel, as the Dockerfile builds it, in an environment of its own: works without the clone."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def _instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)


def _copied() -> list[tuple[list[str], str]]:
    """Sources and target of each COPY from the clone."""
    words = [line.split() for line in _instructions("COPY") if not line.startswith("--from")]
    return [(sources, target) for *sources, target in words]


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from nothing but what the Dockerfile's first stage copies."""
    source = tmp_path_factory.mktemp("source")
    for sources, target in _copied():
        for name in sources:
            if target.startswith("/"):
                continue  # the second stage
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, env=_environment(), timeout=120)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the wheel, and torch and the like from this one, but no way to the clone."""
    folder = tmp_path_factory.mktemp("empty") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, env=_environment(), timeout=120)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    # A path that a .pth file adds is searched, but its own .pth files, as of an editable install, are not followed.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


def _run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=120, env=_environment()
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def _tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_what_the_wheel_holds(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    assert tops == {"distclip", f"{wheel.name.split('-py3')[0]}.dist-info"}, "nothing else at the top level"
    assert "distclip/py.typed" in names
    assert "distclip/_data/monitoring/prometheus/rules/gradients.yaml" in names
    assert "distclip/_data/launch/train_lm.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any("__pycache__" in name or name.startswith("distclip/tests") for name in names)


def test_the_package_is_the_installed_one(python, tmp_path):
    program = "import distclip as d, importlib.metadata as m; print(d.__file__, d.__version__, m.version('distclip'))"
    file, version, installed = _run(python, "-c", program, cwd=tmp_path).split()
    assert Path(file).is_relative_to(python.parents[1])
    assert version == installed


@pytest.mark.parametrize("name", ["monitoring", "launch"])
def test_the_command_writes_its_folders(python, tmp_path, name):
    _run(python.with_name("distclip"), name, "out", cwd=tmp_path)
    assert _tree(tmp_path / "out") == _tree(ROOT / name)


def test_torchrun_finds_the_plug_in(python, tmp_path):
    program = """
import importlib.metadata, inspect
(entry,) = importlib.metadata.entry_points(group="torchrun.logs_specs", name="distclip")
print(inspect.getfile(entry.load()))
"""
    assert Path(_run(python, "-c", program, cwd=tmp_path).strip()).is_relative_to(python.parents[1])


def test_the_version_is_said_once():
    project = (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.*)"$', project, re.MULTILINE)
    assert f'__version__ = "{version}"' in (ROOT / "distclip" / "__init__.py").read_text()


def test_the_dockerfile_copies_what_is_there_and_not_ignored():
    rules = (ROOT / ".dockerignore").read_text().split()
    assert "*" in rules
    for sources, _ in _copied():
        for name in sources:
            assert (ROOT / name).exists()
            assert f"!{name}" in rules


def test_the_image_runs_the_command_as_a_plain_user():
    assert all(re.fullmatch(r"python:3\.\d+-slim-\w+( AS \w+)?", base) for base in _instructions("FROM"))
    last_stage = DOCKERFILE.rpartition("\nFROM ")[2]
    (user,) = re.findall(r"^USER (\w+)$", last_stage, re.MULTILINE)
    assert f"useradd --create-home --uid 10001 {user}" in last_stage
    # Nothing is written into the image as root after the switch.
    assert not re.search(r"^(RUN|COPY|ADD) ", last_stage.partition(f"USER {user}")[2], re.MULTILINE)
    assert _instructions("ENTRYPOINT") == ['["distclip"]']
    (check,) = _instructions("HEALTHCHECK")
    assert check.endswith(f'CMD ["python", "{_copied()[-1][1]}"]')
    (install,) = (run for run in _instructions("RUN") if "*.whl" in run)
    assert "--constraint /tmp/constraints.txt" in install
