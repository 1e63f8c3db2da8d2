from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from distclip.errors import ConfigError
from distclip.telemetry.settings import Level, Settings, named_run_id, read_settings, run_id


def test_defaults():
    assert read_settings({}) == (Settings(bind="127.0.0.1", port=9519, level=Level.NODE), [])


def test_all_values():
    settings, complaints = read_settings(
        {
            "DISTCLIP_BIND": "0.0.0.0",
            "DISTCLIP_PORT": "0",
            "DISTCLIP_SPOOL": "/a",
            "DISTCLIP_SD_DIR": "/b",
            "DISTCLIP_LEVEL": "Rank",
            "DISTCLIP_EVENTS": "/c",
            "DISTCLIP_STEP_LOG": "/d",
        }
    )
    assert not complaints
    assert settings == Settings("0.0.0.0", 0, Path("/a"), Path("/b"), Level.RANK, Path("/c"), Path("/d"))


@pytest.mark.parametrize("value", ["abc", "-1", "65536", "9519.5"])
def test_a_bad_port_is_one_complaint_and_the_default(value):
    settings, complaints = read_settings({"DISTCLIP_PORT": value})
    assert settings.port == 9519
    assert len(complaints) == 1
    assert value in complaints[0]


def test_a_bad_level_is_one_complaint_and_the_default():
    settings, complaints = read_settings({"DISTCLIP_LEVEL": "foo"})
    assert settings.level == Level.NODE
    assert complaints == ["DISTCLIP_LEVEL='foo' is not one of node, rank, param_group; using node"]


def test_empty_counts_as_not_set():
    names = ("BIND", "PORT", "SPOOL", "SD_DIR", "LEVEL", "EVENTS", "STEP_LOG")
    assert read_settings({f"DISTCLIP_{name}": "" for name in names}) == (Settings(), [])


@pytest.mark.parametrize("name", ["SPOOL", "SD_DIR", "EVENTS", "STEP_LOG"])
def test_a_path_that_is_none_is_one_complaint_and_does_without(name):
    settings, complaints = read_settings({f"DISTCLIP_{name}": "~no-such-user-here/x"})
    assert settings == Settings()
    assert len(complaints) == 1
    assert f"DISTCLIP_{name}='~no-such-user-here/x' is not a path" in complaints[0]


def test_relative_paths_are_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_settings({"DISTCLIP_SPOOL": "spool"})[0].spool == tmp_path / "spool"


def test_levels_include_each_other():
    assert Level.PARAM_GROUP > Level.RANK > Level.NODE


def test_run_ids_in_order():
    environ = {"DISTCLIP_RUN_ID": "a", "TORCHX_TRACKING_RUN_NAME": "b", "SLURM_JOB_ID": "c"}
    assert named_run_id(environ, "d") == "a"
    del environ["DISTCLIP_RUN_ID"]
    assert named_run_id(environ, "d") == "b"
    del environ["TORCHX_TRACKING_RUN_NAME"]
    assert named_run_id(environ, "d") == "c"
    assert named_run_id({}, "d") == "d"
    assert named_run_id({"DISTCLIP_RUN_ID": " "}, "none") is None


def test_a_run_id_that_is_no_text_can_still_be_a_label():
    given = b"run-\xff".decode(errors="surrogateescape")  # as os.environ has it
    assert named_run_id({"DISTCLIP_RUN_ID": given}) == "run-?"
    assert named_run_id({}, given) == "run-?"


def test_one_node_without_an_id_gets_a_uuid_and_several_are_an_error():
    assert uuid.UUID(run_id({}, "none", several_nodes=False))
    assert run_id({}, "none", several_nodes=False) != run_id({}, "none", several_nodes=False)
    assert run_id({}, "x", several_nodes=True) == "x"
    with pytest.raises(ConfigError, match="DISTCLIP_RUN_ID"):
        run_id({}, "none", several_nodes=True)
