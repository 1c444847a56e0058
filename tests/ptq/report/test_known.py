"""What recipes are known to cost, and the verdict that rests on it where a recipe sets no limit."""

from __future__ import annotations

import pytest

from formats.checkpoint.read import Checkpoint
from ptq.plan.plan import build_plan
from ptq.recipe.own_model import shipped_paths
from ptq.recipe.reading import load_recipe
from ptq.recipe.schema import AttributionSpec, ThresholdsSpec
from ptq.report import measure as measuring
from ptq.report.data import ReportData, check_known, failure
from ptq.report.known import Known, known_figures, nearest, rounding_noise, write_figures
from ptq.report.report import top_of
from ptq.report.verdict import check_rows, verdict_of
from ptq.result import load_result
from tests.ptq.quantizing import random_tokens
from tests.ptq.report.conftest import measured

OWN = ("a8w8c8", "smoothquant, rtn")


def row(**values: object) -> Known:
    first = {"model": "one", "family": "llama", "parameters": 10**8, "recipe": "a8w8c8"}
    first |= {"scheme": OWN[0], "methods": OWN[1], "perplexity": 1.01, "kl": 0.02}
    first |= {"text": "prose", "device": "a CPU", "made": "2026-11-25", "version": "1"}
    return Known.model_validate(first | values)


def judged(data: ReportData, known: Known, kl: float, ends: tuple[float, float] | None):
    data = measured(data, kl_mean=kl, kl_mean_ci=ends)
    check = check_known(known, data.accuracy)
    failures = () if check.holds else (failure(check, known),)
    figures = {"known": known, "checks": (check,), "failures": failures, "passed": not failures}
    return data.model_copy(update=figures)


def test_what_bf16_rounds_by_itself_is_no_loss_of_a_scheme(made):
    """Rows of a CPU are of fp32; a GPU computes in bf16, but fp16 models in fp16."""
    noise = rounding_noise("cuda", {"dtype": "bfloat16"})
    assert rounding_noise("cpu", {}) == rounding_noise("cuda", {"torch_dtype": "float16"}) == 0
    data = measured(made.data, kl_mean=0.0021, kl_mean_ci=None)
    plain, noisy = (check_known(row(kl=0.001), data.accuracy, own) for own in (0.0, noise))
    assert (plain.holds, noisy.holds) == (False, True)
    assert "rounding of bf16" in failure(noisy, row(kl=0.001))
    judged = data.model_copy(update={"known": row(kl=0.001), "checks": (noisy,)})
    (margin,) = verdict_of(judged).margins
    assert margin.endswith("up to 2 times that and the rounding of bf16 is as expected")
    measured_there = row(kl=0.001, device="NVIDIA H100")
    assert check_known(measured_there, data.accuracy, noise) == plain
    assert "bf16" not in failure(plain, measured_there)


@pytest.mark.parametrize(
    ("kl", "ends", "light"),
    [
        (0.03, (0.02, 0.035), "green"),
        (0.039, (0.03, 0.05), "amber"),
        (0.06, (0.039, 0.08), "amber"),  # it may lose as little as is known
        (0.06, (0.041, 0.08), "red"),
        (0.06, None, "red"),
        (0.03, None, "amber"),
    ],
)
def test_a_run_is_red_where_it_surely_loses_more_than_is_known(made, kl, ends, light):
    data = judged(made.data, row(), kl, ends)
    verdict = verdict_of(data)
    assert verdict.light == light
    assert data.passed == (light != "red")
    assert f"loses {'no ' * (kl <= 0.04)}more than is expected of `a8w8c8`" in verdict.headline
    told = "MISSED" if light == "red" else "holds" if kl <= 0.04 else "unsure"
    assert check_rows(data).rows[0][-1] == told
    (margin,) = verdict.margins
    assert "`a8w8c8` lost 0.02 on one (100 M parameters; prose), and up to 2 times that" in margin
    labels = [point.label for point in top_of(data).points]
    assert labels[0] == "Known"
    if light == "red":
        assert data.failures == (
            "mean KL (nats) 0.06 is surely more than 2 x 0.02, which `a8w8c8` lost on one "
            "(100 M parameters; prose)",
        )


def test_a_report_without_thresholds_says_what_is_known(made, folder, monkeypatch):
    fields = ("accuracy", "speed", "completions", "tasks", "peers", "scheme", "sizes", "kv_scales")
    both = {name: getattr(made.data, name) for name in fields}
    monkeypatch.setattr(measuring, "_run_both", lambda *_, **__: both)
    recipe = load_recipe(folder / "r.yaml")
    made_plan = build_plan(recipe, Checkpoint.open(recipe.model.path), force=True)
    free = recipe.report.model_copy(update={"thresholds": ThresholdsSpec()})

    def report(methods: tuple[object, ...]) -> ReportData:
        own = recipe.model_copy(update={"report": free, "methods": methods})
        plan = made_plan.model_copy(update={"recipe": own})
        tokens = random_tokens(sequences=2, length=16)
        return measuring.measure(load_result(folder / "out"), plan, tokens, progress=False)

    found = report(recipe.methods)
    assert found.known == nearest(*OWN, found.model)
    assert found.known is not None
    assert [check.limit for check in found.checks] == [2 * found.known.kl]
    assert verdict_of(found).light != "grey"
    unknown = report(recipe.methods[:1])
    assert (unknown.known, unknown.checks, unknown.passed) == (None, (), True)
    assert verdict_of(unknown).light == "grey"
    told = f"no other model has a loss of `{unknown.scheme}` by smoothquant to compare"
    assert told in verdict_of(unknown).headline


def test_the_nearest_model_counts_and_another_family_is_a_doubling_off(made):
    model = made.data.model.model_copy(update={"parameters": 10**8})
    assert model.model_type == "llama"
    far, near = row(model="far", parameters=10**9), row(model="near", parameters=3 * 10**8)
    other = row(model="other", parameters=10**8, family="gemma3_text")
    assert nearest(*OWN, model, [far, near]) == near
    assert nearest(*OWN, model, [near, other]) == other
    assert nearest(*OWN, model, [row(model="less", parameters=6 * 10**7), other]) != other
    assert nearest("w4", "gptq", model, [near]) is None


def test_four_bits_of_what_had_four_bits_tell_nothing_of_others(made):
    rows = [row(scheme="w4", methods="gptq", original_bits=4), row(scheme="nvfp4", original_bits=4)]
    assert all(one.flattered for one in rows)
    assert nearest("w4", "gptq", made.data.model, rows) is None
    assert not row(original_bits=4).flattered
    assert not row(scheme="w4").flattered


def test_what_a_budget_ordered_is_no_limit_for_another_budget(made):
    ordered = row(recipe="budget", scheme="w8, mixed", methods="two_sided")
    assert nearest("w8, mixed", "two_sided", made.data.model, [ordered]) is None
    assert nearest("w8, mixed", "two_sided", made.data.model) is None


def test_the_table_is_read_as_it_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr("ptq.report.known.TABLE", tmp_path / "t.csv")
    rows = (row(kl=0.01, weights=0.5), row(model="two", parameters=10**9, kl_low=0.01))
    write_figures(reversed(rows))
    assert known_figures() == rows


def test_shipped_recipes_leave_the_verdict_to_what_is_known():
    for name, path in shipped_paths().items():
        assert load_recipe(path).report.thresholds == ThresholdsSpec(), name


def test_models_that_were_measured_know_the_main_recipes():
    for model in {known.model for known in known_figures()}:
        names = {known.recipe for known in known_figures() if known.model == model}
        assert {"a8w8c8", "a8w8_dynamic", "w8_rtn", "c8"} <= names, model


def test_parts_of_the_loss_are_measured_on_starts_of_sequences():
    sequences = random_tokens(sequences=6, length=32).sequences()
    found = measuring.attributed(sequences, AttributionSpec(sequences=3, tokens=20))
    assert [ids.tolist() for ids in found] == [sequences[i][:20].tolist() for i in (0, 2, 4)]
