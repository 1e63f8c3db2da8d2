from __future__ import annotations

import json
import os
import shutil
import threading
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from distclip.telemetry.exporter import Exporter
from distclip.telemetry.node import Attempt
from distclip.telemetry.settings import Settings
from distclip.telemetry.spool import SpoolWriter


@pytest.fixture
def start(tmp_path):
    exporters = []

    def start(**changes):
        settings = {"port": 0, "spool": tmp_path / "spool", "sd_dir": tmp_path / "sd", **changes}
        exporter = Exporter("r1", Settings(**settings))
        exporters.append(exporter)
        exporter.start()
        return exporter

    yield start
    for exporter in exporters:
        exporter.close()


def read(exporter, path="/metrics"):
    with urllib.request.urlopen(exporter.url + path, timeout=10) as answer:
        return answer.read().decode()


def test_a_life(start, tmp_path, make_info):
    exporter = start()
    (announced,) = (tmp_path / "sd").iterdir()
    assert json.loads(announced.read_text())[0]["targets"] == [exporter.url.removeprefix("http://")]
    assert json.loads(read(exporter, "/healthz")) == {"status": "ok", "run": "r1", "state": "initializing"}
    assert not (tmp_path / "spool").exists()  # nothing to clean up before there are workers

    handed = exporter.start_attempt("initial", 2, Attempt())
    assert handed["DISTCLIP_RUN_ID"] == "r1"
    first = Path(handed["DISTCLIP_SPOOL"])
    assert first.is_dir()
    writer = SpoolWriter(first, make_info())
    assert 'distclip_run_info{nonfinite="skip"' in read(exporter)

    second = Path(exporter.start_attempt("failure", 2, Attempt())["DISTCLIP_SPOOL"])
    assert second.parent == first.parent
    assert second != first
    assert not writer.path.exists()
    assert "distclip_run_info{" not in read(exporter)

    exporter.finish("succeeded")
    assert not list((tmp_path / "spool").iterdir())
    assert 'distclip_run_state{run="r1",state="succeeded"} 1.0' in read(exporter)
    exporter.close()
    assert exporter.url is None
    assert not any((tmp_path / "sd").iterdir())
    exporter.close()


def test_it_lingers_for_who_scrapes_until_somebody_closes(start):
    exporter = start()
    assert exporter.linger_seconds() == 0
    request = urllib.request.Request(exporter.url + "/metrics", headers={"X-Prometheus-Scrape-Timeout-Seconds": "10"})
    urllib.request.urlopen(request, timeout=10).close()
    exporter.finish("succeeded")
    assert exporter.linger_seconds() == 30
    waiting = threading.Thread(target=exporter.linger, args=(600,))
    waiting.start()
    exporter.close()
    waiting.join(30)
    assert not waiting.is_alive()


def test_after_a_signal_it_lingers_for_twenty_seconds_at_most(start):
    exporter = start()
    request = urllib.request.Request(exporter.url + "/metrics", headers={"X-Prometheus-Scrape-Timeout-Seconds": "10"})
    urllib.request.urlopen(request, timeout=10).close()
    exporter.finish("stopped")
    assert exporter.linger_seconds() == 20


def test_a_bad_address_is_one_warning_and_the_loopback_one(start, caplog):
    exporter = start(bind="192.0.2.1")
    assert exporter.url.startswith("http://127.0.0.1:")
    assert len(caplog.records) == 1
    assert "192.0.2.1" in caplog.text


@pytest.mark.parametrize("bind", ["no such host.invalid", "..", "x" * 300])
def test_an_unknown_host_name_is_one_warning_and_the_loopback_one(start, caplog, bind):
    exporter = start(bind=bind)
    assert exporter.url.startswith("http://127.0.0.1:")
    assert len(caplog.records) == 1


def test_a_folder_for_discovery_that_cannot_be_made_is_one_warning(start, caplog):
    exporter = start(sd_dir=Path("/proc/nowhere"))
    assert "distclip_run_state" in read(exporter)
    assert len(caplog.records) == 1
    assert "will not find" in caplog.text


@pytest.mark.parametrize("closed_meanwhile", [False, True])
def test_a_name_that_dns_does_not_tell_keeps_nobody_waiting(start, tmp_path, monkeypatch, closed_meanwhile):
    dns = threading.Event()
    monkeypatch.setattr("socket.getfqdn", lambda: "node" if dns.wait(60) else "late")
    exporter = start(bind="0.0.0.0")
    assert not (tmp_path / "sd").exists() or not list((tmp_path / "sd").iterdir())
    assert 'state="initializing"} 1.0' in read(exporter)
    if closed_meanwhile:
        exporter.close()
    (announcing,) = [thread for thread in threading.enumerate() if thread.name == "distclip-announce"]
    dns.set()
    announcing.join(30)
    assert len(list((tmp_path / "sd").iterdir())) == (0 if closed_meanwhile else 1)


def test_a_folder_for_discovery_that_goes_away_does_not_keep_the_endpoint_from_closing(start, tmp_path):
    exporter = start()
    shutil.rmtree(tmp_path / "sd")
    (tmp_path / "sd").write_text("no folder any more")
    exporter.close()
    assert exporter.url is None


def test_no_room_for_the_spool_hands_workers_none(start, tmp_path, monkeypatch, caplog):
    exporter = start()
    handed = exporter.start_attempt("initial", 2**50, Attempt())  # more than any disk has
    assert handed["DISTCLIP_SPOOL"] == ""
    assert len(caplog.records) == 1
    assert "training goes on" in caplog.text
    assert 'distclip_run_state{run="r1",state="running"} 1.0' in read(exporter)


def test_a_spool_that_somebody_removed_is_there_again_for_the_next_start(start, tmp_path, make_info, caplog):
    exporter = start()
    first = Path(exporter.start_attempt("initial", 1, Attempt())["DISTCLIP_SPOOL"])
    shutil.rmtree(tmp_path / "spool")
    second = Path(exporter.start_attempt("failure", 1, Attempt())["DISTCLIP_SPOOL"])
    assert second.is_dir()
    assert second.parent != first.parent
    SpoolWriter(second, make_info())
    assert 'distclip_run_info{nonfinite="skip"' in read(exporter)
    assert [record.getMessage() for record in caplog.records if "missing" not in record.getMessage()] == []
    exporter.finish("succeeded")
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_run_id_of_any_characters_is_served_and_announced(tmp_path):
    run = 'jøb/日本 "1"\\\n'
    exporter = Exporter(run, Settings(port=0, spool=tmp_path / "spool", sd_dir=tmp_path / "sd"))
    exporter.start()
    try:
        exporter.start_attempt("initial", 1, Attempt())
        families = text_string_to_metric_families(read(exporter))
        assert {sample.labels["run"] for family in families for sample in family.samples} == {run}
        assert json.loads(read(exporter, "/healthz"))["run"] == run
        (announced,) = (tmp_path / "sd").iterdir()
        assert announced.name.isascii()
        assert json.loads(announced.read_text())[0]["labels"] == {"__meta_distclip_run": run}
    finally:
        exporter.close()


def test_a_forked_child_cleans_nothing_up(start, tmp_path):
    exporter = start()
    exporter.start_attempt("initial", 1, Attempt())
    child = os.fork()
    if child == 0:
        exporter.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list((tmp_path / "spool").iterdir())
    assert list((tmp_path / "sd").iterdir())
    assert 'state="running"} 1.0' in read(exporter)
