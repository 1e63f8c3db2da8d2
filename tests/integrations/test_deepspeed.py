"""What came out of deepspeed_worker.py: two ranks, the real DeepSpeed.

The usual model is a 2x2 matrix of zeros without bias, the loss the sum of its outputs for x = [3, 4], so that the
gradient is [[3, 4], [3, 4]] with a norm of sqrt(50) = 7.0711, and the limit is 1.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

Results = list[dict[str, Any]]
STAGES = range(4)
NORM = math.sqrt(50)
FORMS = [
    f"{stage} {form}"
    for stage in STAGES
    for form in (
        "fp32",
        "fp32 offload",
        "bf16",
        "bf16 offload",
        "bf16 fp32 sums",
        "bf16 fp32 sums offload",
        "fp16",
        "fp16 fp32 sums offload",
    )
    if stage or form in ("fp32", "bf16")
]


def outcome(results: Results, name: str) -> Any:
    """What a case returned, which must not be an error; the same on both ranks where it must be."""
    for result in results:
        assert not (isinstance(result[name], dict) and "trace" in result[name]), result[name]["trace"]
    return results[0][name]


def same_on_both(results: Results, name: str) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = outcome(results, name)
    for mine, other in zip(steps, results[1][name], strict=True):
        # repr, since nan is not equal to itself
        assert repr(mine) == repr(other)
    return steps


def test_every_case_is_looked_at(results: Results) -> None:
    assert len(results[0]) == len(results[1]) == 189


@pytest.mark.parametrize("mode", ["", "distclip "])
@pytest.mark.parametrize("form", FORMS)
def test_norm_coefficient_and_update(results: Results, form: str, mode: str) -> None:
    for step in same_on_both(results, f"{mode}steps {form}")[::2]:
        assert step["norm"] == pytest.approx(NORM, rel=1e-6)
        assert step["coefficient"] == pytest.approx(0.141421, abs=1e-5)
        assert step["update"] == pytest.approx(1.0, abs=1e-3)
        assert (step["stepped"], step["reason"], step["nonfinite"]) == (True, None, False)
        assert step["scale"] == (16.0 if "fp16" in form else None)


@pytest.mark.parametrize("mode", ["", "distclip "])
@pytest.mark.parametrize("form", FORMS)
def test_a_nan_on_one_rank_skips_the_step_on_both(results: Results, form: str, mode: str) -> None:
    first, bad, last = same_on_both(results, f"{mode}steps {form}")
    assert math.isnan(bad["norm"])  # not inf
    assert bad["groups"]["default"]["nan"] > 0
    assert bad["groups"]["default"]["inf"] == 0
    assert (bad["stepped"], bad["reason"], bad["nonfinite"], bad["update"]) == (False, "nonfinite", True, 0.0)
    assert bad["weights"] == first["weights"]
    # DeepSpeed's own counters
    assert [step["skipped"] for step in (first, bad, last)] == [0, 1, 1]
    assert [step["steps"] for step in (first, bad, last)] == [1, 2, 3]


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_reported_off_the_accumulation_boundary(results: Results, form: str) -> None:
    steps = same_on_both(results, f"accumulate {form}")
    for step in steps[::2]:
        assert (step["norm"], step["coefficient"], step["stepped"]) == (None, None, None)
        assert (step["reason"], step["update"]) == ("accumulating", 0.0)
    assert [step["norm"] for step in steps[1::2]] == pytest.approx([NORM, 10 * NORM], rel=1e-6)
    assert [step["update"] for step in steps[1::2]] == pytest.approx([1.0, 1.0], abs=1e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_where_the_caller_owns_the_boundary_every_step_is_one(results: Results, stage: int) -> None:
    steps = same_on_both(results, f"unmanaged {stage}")
    assert [step["norm"] for step in steps] == pytest.approx([NORM, 10 * NORM], rel=1e-6)
    assert [step["stepped"] for step in steps] == [True, True]


@pytest.mark.parametrize("offload", ["", " offload"])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_with_other_data_are_averaged(results: Results, stage: int, offload: str) -> None:
    if stage or not offload:
        (step,) = same_on_both(results, f"uneven {stage} fp32{offload}")
        assert step["norm"] == pytest.approx(12.649, abs=1e-3)  # [4, 8] twice


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "norm", "coefficient", "update"),
    [("binding", NORM, 0.141421, 1.0), ("free", NORM / 10, 1.0, NORM / 10), ("distclip", NORM, 0.141421, 1.0)],
)
def test_a_growing_loss_scale_changes_no_update(
    results: Results, stage: int, kind: str, norm: float, coefficient: float, update: float
) -> None:
    steps = same_on_both(results, f"growth {kind} {stage}")
    assert [step["scale"] for step in steps] == [16, 16, 32, 64, 128, 256]
    for step in steps:
        assert step["norm"] == pytest.approx(norm, rel=1e-3)
        assert step["coefficient"] == pytest.approx(coefficient, abs=1e-3)
        # weights are in fp16 too, so the last of six updates is read off numbers of 4
        assert step["update"] == pytest.approx(update, abs=3e-3)
        if kind != "distclip":
            assert step["deepspeed"] == pytest.approx(norm, rel=1e-3)


def test_stage_0_with_fp16_is_refused_unless_the_scale_is_1(results: Results) -> None:
    assert "divides by the scale (now 65536)" in results[0]["stage 0 fp16"]["error"]
    assert '"fp16.loss_scale" to 1' in results[0]["stage 0 fp16"]["error"]
    (step,) = same_on_both(results, "stage 0 fp16 scale 1")
    assert step["norm"] == pytest.approx(NORM)
    assert step["update"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_without_deepspeeds_overflow_check_a_nan_makes_no_step(results: Results, stage: int) -> None:
    _, bad, last = same_on_both(results, f"unchecked {stage}")
    assert (bad["stepped"], bad["reason"], bad["update"], bad["skipped"]) == (False, "nonfinite", 0.0, 1)
    assert last["stepped"]
    assert last["update"] == pytest.approx(1.0, abs=1e-3)


def test_the_same_model_has_the_same_norm_under_ddp_fsdp2_and_zero(results: Results) -> None:
    found = outcome(results, "same model")
    for name in ("fsdp2", "zero0", "zero1", "zero2", "zero3"):
        assert found[name] == pytest.approx(found["ddp"], rel=1e-6)
    assert [found[f"strategy{stage}"] for stage in STAGES] == ["zero0", "zero1", "zero2", "zero3"]
    # 66 elements: all on each rank in stage 0, else each on one, without what fills up partitions
    assert found["elements0"] == 66
    for stage in (1, 2, 3):
        assert found[f"elements{stage}"] + results[1]["same model"][f"elements{stage}"] == 66


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("offload", ["", " offload"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_is_that_of_what_deepspeeds_public_call_gives(
    results: Results, stage: int, offload: str, precision: str
) -> None:
    if stage or not offload:
        found = outcome(results, f"public {stage} {precision}{offload}")
        assert found["measured"] == pytest.approx(found["public"], rel=1e-6)
        assert found["stepped"] == found["measured"]


@pytest.mark.parametrize("decides", ["deepspeed", "distclip"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_skip_leaves_optimizer_schedule_and_followers_alone(results: Results, stage: int, decides: str) -> None:
    first, skipped, last = outcome(results, f"state {stage} {decides}")["seen"]
    assert skipped == first
    assert first[1:3] == [0.5, 1]
    assert last[1:3] == [0.25, 2]
    assert last[0] != first[0]


@pytest.mark.parametrize("stage", STAGES)
def test_raise_names_the_parameter_and_leaves_the_engine_in_order(results: Results, stage: int) -> None:
    found = outcome(results, f"raising {stage}")
    assert found["error"].startswith("step 1: gradients are not finite: rank 0: 'weight' has ")
    assert found["error"] == results[1][f"raising {stage}"]["error"]
    assert found["micro_steps"] == 2
    assert found["after"]["stepped"]
    assert found["after"]["norm"] == pytest.approx(NORM)


@pytest.mark.parametrize("name", ["0", "1", "1 fp32 sums", "2", "3"])
def test_bad_elements_can_be_zeroed_instead(results: Results, name: str) -> None:
    _, step = same_on_both(results, f"zeroing {name}")
    # of [nan, 4] twice the fours are left
    assert step["norm"] == pytest.approx(math.sqrt(32), rel=1e-3)
    assert step["stepped"]
    assert step["update"] == pytest.approx(1.0, abs=5e-3)
    assert all(math.isfinite(weight) for weight in step["weights"])


@pytest.mark.parametrize("stage", STAGES)
def test_propagate_leaves_nonfinite_steps_to_deepspeed(results: Results, stage: int) -> None:
    (step,) = same_on_both(results, f"propagating {stage}")
    # only the plain optimizer of stage 0 takes it
    assert step["stepped"] == (stage == 0)
    assert step["reason"] == (None if stage == 0 else "nonfinite")
    assert math.isnan(step["weights"][0]) == (stage == 0)


@pytest.mark.parametrize("stage", STAGES)
def test_other_norms(results: Results, stage: int) -> None:
    (step,) = same_on_both(results, f"inf-norm {stage}")
    assert step["norm"] == 4.0
    assert step["coefficient"] == pytest.approx(0.25, abs=1e-6)
    assert step["update"] == pytest.approx(NORM / 4, rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_a_finite_step_that_deepspeed_skips_is_reported_so(results: Results, stage: int) -> None:
    (step,) = same_on_both(results, f"huge {stage}")
    if stage == 0:
        assert step["norm"] == math.inf  # DeepSpeed adds before it divides, so the average itself is inf
        return
    assert step["norm"] == pytest.approx(3e38 * math.sqrt(2))
    # stages 1 and 2 add squares in fp32, stage 3 in fp64
    assert step["stepped"] == (stage == 3)
    assert step["reason"] == (None if stage == 3 else "policy")


@pytest.mark.parametrize("stage", STAGES)
def test_param_groups_have_limits_of_their_own(results: Results, stage: int) -> None:
    found = outcome(results, f"grouped {stage}")
    assert found["decides"] == "distclip"
    assert found["groups"]["first"]["norm"] == pytest.approx(0.2028349, rel=1e-5)
    assert found["groups"]["default"]["norm"] == pytest.approx(0.5679199, rel=1e-5)
    assert found["moved"] == pytest.approx([0.01, 0.001], rel=1e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_telemetry_gets_one_record_for_each_step(results: Results, stage: int) -> None:
    found = outcome(results, f"telemetry {stage}")
    assert (found["strategy"], found["has_optimizer"], found["applied"]) == (f"zero{stage}", True, 0)
    first, bad, last = found["records"]
    assert [record["step"] for record in (first, bad, last)] == [1, 2, 3]
    assert first["norm"] == pytest.approx(NORM)
    assert (first["limit"], first["lr"], first["loss"], first["elements"]) == (1.0, 1.0, 2.5, 4)
    assert (bad["stepped"], bad["reason"], bad["nan"], bad["inf"]) == (False, "nonfinite", 2, 0)
    assert [0, "weight"] in bad["culprits"]
    assert last["stepped"]
    assert bad["culprits"] == results[1][f"telemetry {stage}"]["records"][1]["culprits"]


def test_nonfinite_gradients_that_were_applied_are_counted(results: Results) -> None:
    found = outcome(results, "applied")
    assert found["applied"] == 1
    assert found["records"][1]["stepped"]


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("missing", '"gradient_clipping" is missing from'),
        ("zero", 'max_norm=1, but "gradient_clipping" is 0 in'),
        ("other", '"gradient_clipping" is 0.5 in DeepSpeed\'s configuration, but max_norm=1.0'),
        ("window", '"fp16.loss_scale_window" is 1'),
        ("static", '"fp16.loss_scale" is 128'),
        ("version", "deepspeed==0.99.0 is not the version"),
    ],
)
def test_a_doubtful_configuration_is_worth_one_warning_that_names_the_key(
    results: Results, name: str, note: str
) -> None:
    found = outcome(results, f"notes: {name}")
    assert found["error"] is None
    assert len(found["notes"]) == 1
    assert note in found["notes"][0]
    assert results[1][f"notes: {name}"]["notes"] == []  # rank 0 speaks for all


@pytest.mark.parametrize("name", ["none", "measure only"])
def test_a_good_configuration_is_worth_none(results: Results, name: str) -> None:
    assert outcome(results, f"notes: {name}") == {"notes": [], "error": None}


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("twice", '"gradient_clipping" is 1 in'),
        ("lacks", 'knows no nonfinite="zero"'),
        ("offload", '"zero_optimization.offload_optimizer"'),
        ("decides", "decides must be 'auto', 'deepspeed' or 'distclip', not 'me'"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(results: Results, name: str, error: str) -> None:
    for result in results:
        assert error in result[f"notes: {name}"]["error"]


def test_a_deepspeed_that_looks_otherwise_inside_fails_loudly(results: Results) -> None:
    found = outcome(results, "guards")
    kinds = [
        "FP16_UnfusedOptimizer",
        "DeepSpeedZeroOptimizer",
        "DeepSpeedZeroOptimizer",
        "DeepSpeedZeroOptimizer_Stage3",
    ]
    for stage, kind in enumerate(kinds):
        assert found[f"gone {stage}"].startswith(f"DeepSpeed 0.19.8: {kind} has no gone, which distclip reads")
    assert found["not passed"].startswith("DistclipError: DeepSpeed 0.19.8 stepped without passing")
    assert found["unknown"].startswith("ConfigError: DeepSpeed's object is not one that distclip can look into")
    assert "use step()" in found["clip_"]
    assert "divide the loss instead" in found["multiplier"]
    assert "pipeline engine" in found["no pipeline"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("decides", ["deepspeed", "distclip"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_experts_of_all_ranks_are_summed(results: Results, stage: int, decides: str, precision: str) -> None:
    if stage == 0 and decides == "deepspeed":
        assert "stage 0 with experts" in results[0]["experts refused"]["error"]
        return
    found = outcome(results, f"experts {stage} {precision} {decides}")
    assert found["expert"][1] > 0.1 * found["expert"][0], "experts hardly matter here"
    assert found["norm"] == pytest.approx(found["public"], rel=1e-3)
    assert found["coefficient"] == pytest.approx(1 / found["public"], rel=1e-3)
    assert found["update"] == pytest.approx(1.0, abs=5e-3)


@pytest.mark.parametrize("decides", ["deepspeed", "distclip"])
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (0, "bf16"), (1, "fp32"), (1, "bf16")])
def test_pipeline_stages_are_one_model(results: Results, stage: int, precision: str, decides: str) -> None:
    if (stage, precision, decides) == (0, "fp32", "deepspeed"):
        assert "stage 0 with pipeline stages" in results[0]["pipeline refused"]["error"]
        return
    found = outcome(results, f"pipeline {stage} {precision} {decides}")
    assert found["norms"] == pytest.approx(found["expected"], rel=1e-5 if precision == "fp32" else 0.01)
    assert found["norms"] == results[1][f"pipeline {stage} {precision} {decides}"]["norms"]
    assert found["stepped"] == [True] * 3
