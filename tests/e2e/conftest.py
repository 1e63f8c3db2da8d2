"""Real torchrun processes for the tests in this folder: started with free ports, watched, and always cleaned up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def _get(url: str, agent: str = "tests") -> str:
    request = urllib.request.Request(url, headers={"User-Agent": agent})
    with urllib.request.urlopen(request, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def _parse(page: str) -> Series:
    return {
        (sample.name, tuple(sorted((key, value) for key, value in sample.labels.items() if key != "run"))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


class Scraper:
    """A scraper with a fixed interval; `scrapes` is all that it got until the endpoint closed."""

    def __init__(self, url: str, interval: float) -> None:
        self._url = url
        self._interval = interval
        self._pages = [_get(f"{url}/metrics", "scraper")]
        time.sleep(interval)
        self._pages.append(_get(f"{url}/metrics", "scraper"))  # from here on the endpoint knows the interval
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def scrapes(self) -> list[Series]:
        """Waits for the end of the endpoint."""
        self._thread.join(120)
        assert not self._thread.is_alive(), "the endpoint does not close"
        return [_parse(page) for page in self._pages]

    def _run(self) -> None:
        while True:
            time.sleep(self._interval)
            try:
                self._pages.append(_get(f"{self._url}/metrics", "scraper"))
            except OSError:
                return


class TorchrunJob:
    """One torchrun, its output, and its endpoint as a Prometheus would find it."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self.folder = folder
        self.spool = Path(environment["DISTCLIP_SPOOL"])
        self._output = folder / "output.txt"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def targets(self) -> list[str]:
        """What the file_sd files announce now."""
        found = [json.loads(path.read_text()) for path in sorted((self.folder / "sd").glob("*.json"))]
        return [target for groups in found for group in groups for target in group["targets"]]

    def endpoint(self) -> str:
        """The announced URL, waited for."""
        self.until(lambda: bool(self.targets()), "an endpoint")
        return f"http://{self.targets()[0]}"

    def read(self, path: str = "/metrics") -> str:
        return _get(self.endpoint() + path)

    def scrape(self) -> Series:
        """All samples: (name, labels but run) to value."""
        return _parse(self.read())

    def scrape_to_the_end(self, interval: float = 0.5) -> Scraper:
        """Scrape in the background, as a Prometheus does, until the endpoint closes."""
        return Scraper(self.endpoint(), interval)

    def value(self, name: str, **labels: str) -> float | None:
        return self.scrape().get((name, tuple(sorted(labels.items()))))

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
        """Wait for a condition; a torchrun that ends first, or the time limit, is a failure that shows the output."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {seconds} s:\n{self.output}"
            assert self.process.poll() is None, f"torchrun ended before {what}:\n{self.output}"
            time.sleep(0.02)

    def until_value(self, expected: float, name: str, **labels: str) -> None:
        self.until(lambda: self.value(name, **labels) == expected, f"{name}{labels} == {expected}")

    def go(self, attempt: int, step: int, rank: int | None = None) -> None:
        """Let workers that wait in this step go on, all or one."""
        (self.folder / f"go-{attempt}-{step}{'' if rank is None else f'-{rank}'}").touch()

    def until_steps(self, step: int, ranks: int) -> None:
        """Wait until every rank of the present attempt has made this step; needs level rank."""
        for rank in range(ranks):
            self.until_value(step, "distclip_last_step", rank=str(rank))

    def wait(self, seconds: float = 150) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"torchrun did not end within {seconds} s:\n{self.output}")

    def processes(self) -> list[int]:
        """Pids of torchrun, its workers, and whatever they started: all that have this job's environment."""
        mark = f"DISTCLIP_SD_DIR={self.folder / 'sd'}\0".encode()
        found = []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                if mark in environment.read_bytes():
                    found.append(int(environment.parent.name))
        return found

    def kill(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class Torchruns:
    """Starts torchrun in folders of its own, and ends what is left of all of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs: list[TorchrunJob] = []

    def __call__(
        self,
        *options: str,
        script: list[str] | None = None,
        program: bool = False,
        environment: dict[str, str] | None = None,
        prefix: list[str] | None = None,
    ) -> TorchrunJob:
        """Start `torchrun --logs-specs distclip OPTIONS`.

        `script` is what follows torchrun's options: with `--no-python` last or with `program` a whole command line,
        else arguments of `torchrun_worker.py`. `prefix` goes before all.
        """
        folder = self._folder / f"job-{len(self._jobs)}"
        folder.mkdir()
        worker = [str(Path(__file__).with_name("torchrun_worker.py")), "--folder", str(folder)]
        whole = program or options[-1] == "--no-python"
        command = [
            *(prefix or []),
            *(sys.executable, "-m", "torch.distributed.run", "--logs-specs", "distclip"),
            *options,
            *([] if whole else worker),
            *(script or []),
        ]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("DISTCLIP_", "SLURM_"))}
        mine = {
            "OMP_NUM_THREADS": "1",
            "DISTCLIP_PORT": "0",
            "DISTCLIP_SD_DIR": str(folder / "sd"),
            "DISTCLIP_SPOOL": str(folder / "spool"),
            "DISTCLIP_RUN_ID": "r1",
            "TMPDIR": str(folder),  # torchrun leaves a folder for logs there
        }
        job = TorchrunJob(command, {**inherited, **mine, **(environment or {})}, folder)
        self._jobs.append(job)
        return job

    def kill(self) -> None:
        for job in self._jobs:
            job.kill()


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Torchruns]:
    """`torchrun("--nproc-per-node=2", ..., script=[...], environment={...})`: a started `TorchrunJob`."""
    torchruns = Torchruns(tmp_path)
    yield torchruns
    torchruns.kill()


@pytest.fixture(scope="module")
def shared_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Torchruns]:
    """The same for runs that several tests of a module look at: each start of torchrun takes seconds."""
    torchruns = Torchruns(tmp_path_factory.mktemp("shared"))
    yield torchruns
    torchruns.kill()
