from __future__ import annotations

import argparse
import math

import pytest
from lm_faults import KINDS, Fault, batch_weight, fault_problem, parse_fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("nan@20:rank=1", Fault("nan", 20, 20, 1)),
        ("inf@7", Fault("inf", 7, 7)),
        ("zero@35-40", Fault("zero", 35, 40)),
        ("tiny@45-48:rank=0", Fault("tiny", 45, 48, 0)),
        ("spike@50", Fault("spike", 50, 50)),
        ("kill@30:rank=1", Fault("kill", 30, 30, 1)),
    ],
)
def test_each_form_is_read_and_written_back(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault
    assert str(fault) == text


@pytest.mark.parametrize(
    "text", ["", "nan", "nan@", "@3", "nan@x", "nan@3-", "nan@-3", "nan@3:rank=", "nan@3:rank=a", "nan@3:1", "nan@3 "]
)
def test_what_cannot_be_read_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"Forms: KIND@STEP, KIND@FIRST-LAST"):
        parse_fault(text)


def test_an_unknown_kind_is_named_together_with_the_known_ones() -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        parse_fault("nam@3")
    assert "unknown kind 'nam'" in str(error.value)
    assert all(kind in str(error.value) for kind in KINDS)


@pytest.mark.parametrize("text", ["nan@0", "zero@5-4", "zero@0-3"])
def test_steps_count_upwards_from_1(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="count upwards from 1"):
        parse_fault(text)


def test_a_fault_hits_its_steps_on_its_rank_only() -> None:
    faults = [parse_fault("zero@3-5:rank=1")]
    assert [batch_weight(faults, step, 1) for step in range(2, 7)] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert [batch_weight(faults, step, 0) for step in range(2, 7)] == [1.0] * 5


def test_weights_have_the_sizes_that_the_names_promise() -> None:
    faults = [
        parse_fault(f"{kind}@{step}") for step, kind in enumerate(("nan", "inf", "tiny", "spike", "kill"), start=1)
    ]
    weights = [batch_weight(faults, step, 0) for step in range(1, 6)]
    assert math.isnan(weights[0])
    assert weights[1:] == [math.inf, 1e-9, 1e4, 1.0]


def test_a_fault_that_could_never_happen_is_refused() -> None:
    assert fault_problem([parse_fault("nan@10:rank=1")], steps=10, world_size=2) is None
    late, stranger = parse_fault("nan@9-11"), parse_fault("nan@3:rank=2")
    assert fault_problem([late], steps=10, world_size=2) == "--inject: nan@9-11: the run has only 10 steps"
    assert (
        fault_problem([stranger], steps=10, world_size=2) == "--inject: nan@3:rank=2: the run has only the ranks 0 to 1"
    )
