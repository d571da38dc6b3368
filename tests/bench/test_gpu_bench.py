"""The benches of `bench/gpu`, on the CPU with a tiny model: that they run, resume, and compute what they say."""

from __future__ import annotations

import argparse
import json
import os
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the benches are no part of the package

from bench.gpu import costs, generation, learning, report, runs, trl_update, update
from bench.gpu.cells import Cell, Cells, read_cells
from bench.gpu.floor import Rates, measure_rates, traffic
from bench.gpu.lengths import TAILS, Tail
from bench.gpu.native_side import NativeSide
from bench.gpu.shapes import SHAPES, adapter, make_model, skeleton, write_adapter_folder, write_config_folder
from bench.gpu.sides import Ask
from stretto.recipe.reading import load_recipe

torch.set_num_threads(1)


# -- shapes and arithmetic ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("0.6B", 596_049_920), ("1.7B", 1_720_574_976), ("4B", 4_022_468_096), ("8B", 8_190_735_360)],
)
def test_a_shape_has_as_many_parameters_as_the_published_model(size: str, parameters: int) -> None:
    assert sum(p.numel() for p in skeleton(size).parameters()) == parameters


def test_folders_for_vllm_hold_a_configuration_and_an_adapter_of_every_linear_layer(tmp_path: Path) -> None:
    config = json.loads((write_config_folder(tmp_path / "model", "1.7B") / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["head_dim"]) == (2_048, 28, 128)
    assert (config["dtype"], config["architectures"]) == ("bfloat16", ["Qwen3ForCausalLM"])
    folder = write_adapter_folder(tmp_path / "adapter", "tiny", 0)
    made = json.loads((folder / "adapter_config.json").read_text())
    assert made["r"] == 16
    assert len(made["target_modules"]) == 7
    assert (folder / "adapter_model.safetensors").exists()


def test_an_engine_is_gone_with_its_cache_when_the_next_is_made() -> None:
    side = NativeSide("tiny", lora=True, device="cpu", prefill_tokens=64)
    side.prepare(2, 64, 32)
    cache = weakref.ref(side.engine._cache)
    side.prepare(2, 64, 32)
    assert cache() is None
    assert side.engine._cache is not None


def test_adapters_of_different_versions_differ() -> None:
    model = make_model("tiny", "cpu")
    assert adapter(model, 0).checksum != adapter(model, 1).checksum


def test_the_floor_of_a_step_is_the_formula() -> None:
    needs, rates = traffic("8B"), Rates(4e12, 8e14)
    table = 151_936 * 4_096  # untied: the embedding is only looked up
    assert needs.weight_bytes == 2 * (8_190_735_360 - table)
    assert needs.kv_bytes_per_token == 2 * 36 * 8 * 128 * 2
    small = needs.step_s(rates, 1, 0)
    assert small == pytest.approx(needs.weight_bytes / 4e12)
    large = needs.step_s(rates, 512, 512 * 100)
    assert large == pytest.approx(512 * 100 * 147_456 / 4e12 + 512 * needs.weight_flops_per_row / 8e14)
    assert needs.step_s(rates, 1, 0, versions=3) == pytest.approx(small + 3 * needs.adapter_bytes / 4e12)


def test_the_floor_of_a_generation_is_the_sum_of_its_steps() -> None:
    needs, rates = traffic("0.6B"), Rates(4e12, 8e14)
    steps = sum(needs.step_s(rates, 4, 4 * (10 + i)) for i in range(1, 6))
    prefill = needs.weight_bytes / 4e12
    assert needs.generation_s(rates, 4, 10, 6) == pytest.approx(prefill + steps)


def test_rates_are_positive() -> None:
    rates = measure_rates("cpu", quick=True)
    assert rates.bandwidth > 0
    assert rates.peak > 0


def test_lengths_are_the_same_for_the_same_seed_and_stay_under_the_cap() -> None:
    tail = TAILS["published"]
    lengths = tail.draw(20_000, seed=3)
    assert (lengths == tail.draw(20_000, seed=3)).all()
    assert lengths.min() >= 1
    assert lengths.max() == 16_384
    assert np.median(lengths) == pytest.approx(600, rel=0.05)


def test_rows_met_under_way_are_met_in_proportion_to_their_length() -> None:
    tail = Tail(100, 0.5, 100_000)
    made, left = tail.underway(40_000, seed=0)
    assert left.min() >= 1
    second, first = np.exp(2 * np.log(100) + 2 * 0.25), np.exp(np.log(100) + 0.125)
    assert (made + left).mean() == pytest.approx(second / first, rel=0.03)
    assert made.mean() == pytest.approx(left.mean(), rel=0.03)


def test_the_fit_of_a_step_finds_its_parts_and_none_below_zero() -> None:
    true = costs.StepCost(3e-3, 1e-5, 2e-8)
    points = [(r, r * c, true.seconds(r, r * c)) for r in (1, 64, 256) for c in (128, 4_096)]
    found = costs.fit(points)
    assert (found.a, found.b, found.c) == pytest.approx((true.a, true.b, true.c), rel=1e-6)
    flat = costs.fit([(1, 10, 1.0), (10, 100, 0.9), (20, 300, 0.8)])
    assert min(flat.a, flat.b, flat.c) >= 0


def test_lengths_that_are_all_alike_leave_nothing_to_gain() -> None:
    cost = costs.StepCost(1e-3, 1e-6, 1e-9)
    assert costs.ideal_gain(cost, [[100] * 16], 8, 16, 0.5)["gain"] == pytest.approx(1.0)
    assert costs.ideal_gain(cost, [[10] * 15 + [1_000]], 8, 16, 0.0)["gain"] > 5


# -- cells -------------------------------------------------------------------------------------------------------------


def test_a_cell_that_is_there_is_measured_again_only_without_resume(tmp_path: Path) -> None:
    cell, calls = Cell("decode", "native", {"batch": 4, "size": "tiny"}), []

    def work() -> dict[str, Any]:
        calls.append(1)
        return {"tokens_per_s": 7.0}

    Cells(tmp_path / "a", resume=True).measure(cell, work)
    assert Cells(tmp_path / "a", resume=True).measure(cell, work) is None
    assert Cells(tmp_path / "b", resume=True, known=[tmp_path / "a"]).measure(cell, work) is None
    assert len(calls) == 1
    Cells(tmp_path / "a", resume=False).measure(cell, work)
    assert len(calls) == 2
    (record,) = read_cells([tmp_path / "a", tmp_path / "b"])
    assert record["parameters"] == {"batch": 4, "size": "tiny"}
    assert {"date", "device", "driver", "versions", "command", "sitting"} <= record.keys()


def test_a_cell_that_does_not_fit_is_recorded_and_one_that_fails_is_not(tmp_path: Path) -> None:
    cells = Cells(tmp_path, resume=True)

    def too_much() -> dict[str, Any]:
        raise torch.OutOfMemoryError("no room")

    def broken() -> dict[str, Any]:
        raise RuntimeError("broken")

    cells.measure(Cell("decode", "native", {"batch": 1}), too_much)
    with pytest.raises(RuntimeError, match="broken"):
        cells.measure(Cell("decode", "native", {"batch": 2}), broken)
    (record,) = read_cells([tmp_path])
    assert record["results"] == {"does_not_fit": "no room"}


def test_the_report_joins_sides_and_stars_a_ratio_of_two_sittings(tmp_path: Path) -> None:
    parameters = {"size": "1.7B", "batch": 64, "lora": 0, "prompt": 128, "tokens": 512}
    for batch, sitting in ((64, "one"), (256, "two")):
        here = {**parameters, "batch": batch}
        Cells(tmp_path, resume=False, sitting="one").write(Cell("decode", "native", here), {"tokens_per_s": 30_000.0})
        Cells(tmp_path, resume=False, sitting=sitting).write(Cell("decode", "vllm", here), {"tokens_per_s": 20_000.0})
    text = report.report(read_cells([tmp_path]))
    assert "| 64 | 30,000 | 20,000 | 1.50 |" in text
    assert "| 256 | 30,000 | 20,000 | 1.50* |" in text


def test_drains_of_other_prompts_are_not_held_against_one_another(tmp_path: Path) -> None:
    cells = Cells(tmp_path, resume=False, sitting="one")
    work = {"size": "1.7B", "tail": "short", "groups": 64, "lora": 0}
    for side, prompt, found in (("native", 128, 30.0), ("native", 1_024, 20.0), ("vllm", 1_024, 10.0)):
        cells.write(Cell("drain", side, {**work, "prompt": prompt}), {"tokens_per_s": found})
    cells.write(Cell("sustained", "native", {**work, "lora": 3, "prompt": 128}), {"tokens_per_s": 60.0})
    text = report.report(read_cells([tmp_path]))
    assert "| 64 x 8 | 128 | 0 | 30 | - | - | 60 | 2.00 | - |" in text
    assert "| 64 x 8 | 1,024 | 0 | 20 | 10 | 2.00 | - | - | - |" in text


def test_a_run_is_held_against_the_fastest_setting_of_trl_over_the_same_prompts(tmp_path: Path) -> None:
    cells = Cells(tmp_path, resume=False, sitting="one")
    work = {"size": "1.7B", "tail": "stop-tokens", "groups": 64}
    run = {**work, "prompt": 128, "paradigm": "multi-version", "staleness": 4, "updates": 8}
    cells.write(Cell("update", "native", run), {"tokens_per_s": 100.0})
    tried: list[tuple[int, int, dict[str, Any]]] = [
        (128, 4, {"does_not_fit": "by far"}),
        (128, 8, {"tokens_per_s": 10.0}),
        (128, 16, {"tokens_per_s": 20.0}),
        (64, 32, {"tokens_per_s": 50.0}),
    ]
    for prompt, micro, results in tried:
        cells.write(Cell("update", "trl", {**work, "prompt": prompt, "micro": micro, "updates": 2}), results)
    (line,) = [each for each in report.report(read_cells([tmp_path])).splitlines() if "multi-version" in each]
    assert line.endswith("| 5.00 |")


def test_an_unknown_size_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="`--sizes 3B`"):
        make_model("3B", "cpu")


# -- whole benches on the tiny shape -----------------------------------------------------------------------------------


def _cells(folder: Path) -> dict[str, dict[str, Any]]:
    return {Cell(r["bench"], r["side"], r["parameters"]).name: r for r in read_cells([folder])}


@pytest.mark.parametrize("lora", ["0", "1,3"])
def test_decode_and_rollout_measure_every_cell_of_the_native_side(tmp_path: Path, lora: str) -> None:
    arguments = ["--tiny", "--side", "native", "--device", "cpu", "--lora", lora, "--repeats", "1", "--sustained", "1"]
    arguments += ["--out", str(tmp_path), "--resume"]
    assert generation.main(generation.BENCHES, None, arguments) == 0
    found = _cells(tmp_path)
    kinds = {record["bench"] for record in found.values()}
    assert kinds == ({"decode", "filled", "drain"} if lora == "0" else {"decode", "filled", "drain", "sustained"})
    for record in found.values():
        assert record["results"]["tokens_per_s"] > 0, record
    filled = next(r["results"] for r in found.values() if r["bench"] == "filled")
    assert filled["tokens"] == 2 * 4
    assert 48 < filled["context_mean"] < 64
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert generation.main(generation.BENCHES, None, arguments) == 0
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_every_paradigm_trains_the_same_lengths_and_the_report_has_their_ratio(tmp_path: Path) -> None:
    common = ["--tiny", "--device", "cpu", "--out", str(tmp_path)]
    for paradigm in ("synchronous", "multi-version", "drop"):
        assert update.main([*common, "--paradigms", paradigm]) == 0
    tokens = {r["parameters"]["paradigm"]: r["results"]["tokens"] for r in read_cells([tmp_path])}
    assert tokens["synchronous"] == tokens["multi-version"] == TAILS["tiny"].draw(3 * 2 * 8, seed=0).sum()
    assert "| multi-version | 1 |" in report.report(read_cells([tmp_path]))


def test_stop_tokens_end_completions_where_lengths_are_not_forced(tmp_path: Path) -> None:
    options = update.parse(["--tiny", "--device", "cpu", "--tail", "stop-tokens", "--stop-tokens", "64"])
    options.updates = 1
    work = update.work_of(update.cell_of("synchronous", 2, options), options)
    assert len(set(work.stop_tokens)) == 64
    assert max(work.stop_tokens) < SHAPES["tiny"].vocab_size
    assert work.kv_tokens < 16 * update.STOP_MAX_TOKENS / 2, "rows are not planned to be as long as can be all at once"
    made = runs.run_once(work, "cpu", tmp_path)
    assert made["summary"]["truncated_trajectories"] == 0
    assert made["summary"]["tokens"] < 16 * 40


def test_costs_are_measured_and_the_report_computes_the_ideal_gain(tmp_path: Path) -> None:
    assert costs.main(["--tiny", "--device", "cpu", "--out", str(tmp_path)]) == 0
    parameters = {"size": "tiny", "lora": 3, "tokens": 4, "batch": 8, "prompt": 32}
    Cells(tmp_path, resume=False).write(Cell("step", "native", parameters), {"step_ms": 90.0, "context_mean": 35.0})
    assert "Cost of a step and the ideal gain" in report.report(read_cells([tmp_path]))


# -- TRL's side, as far as it goes without TRL -------------------------------------------------------------------------


def test_a_run_that_is_not_the_usual_one_is_a_cell_of_its_own() -> None:
    def names(*arguments: str) -> set[str]:
        options = update.parse([*arguments, "--out", "nowhere"])
        return {update.cell_of(paradigm, 16, options).name for paradigm in ("multi-version", "synchronous")}

    usual = names()
    assert names("--in-flight", "2", "--micro-tokens", "16384") == usual
    assert len(names("--in-flight", "9") & usual) == 1, "synchronous has one batch in flight, whatever is asked for"
    assert not names("--micro-tokens", "32768") & usual


def test_the_clock_leaves_the_first_update_out() -> None:
    clock = trl_update.Clock()
    for update_ids in ([[1] * 5], [[1] * 7, [2] * 3], [[1] * 10]):
        clock.began.append(clock.now())
        assert set(clock.reward(["x"] * len(update_ids), completion_ids=update_ids)) <= {0.0, 1.0}
        clock.ended.append(clock.now())
    results = clock.results()
    assert results["tokens"] == 20
    assert results["longest"] == 10
    assert clock.results(warm_up=0)["tokens"] == 25
    assert clock.results(warm_up=0)["wall_s"] > results["wall_s"]
    clock.scored.append(clock.now())
    with pytest.raises(RuntimeError, match="rewards were asked for 4 times in 3 updates"):
        clock.results()


def test_a_sweep_that_was_measured_before_warms_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_ups: list[tuple[int, int]] = []

    def measure(options: Any, setting: Any, groups: int, folder: Path, warm_up: int = 1) -> dict[str, Any]:
        warm_ups.append((groups, warm_up))
        return {"tokens_per_s": float(setting.micro)}

    monkeypatch.setattr(trl_update, "measure", measure)
    monkeypatch.setattr(trl_update, "start_vllm_once", lambda most_rows: None)
    monkeypatch.setattr(trl_update, "model_folder", lambda *_: None)
    arguments = ["--size", "tiny", "--stop-tokens", "2", "--sweep", "8:on,16:on", "--sweep-groups", "8"]
    arguments += ["--out", str(tmp_path), "--resume"]
    assert trl_update.main([*arguments, "--groups", "64"]) == 0
    assert warm_ups == [(8, 1), (8, 1), (64, 0)]
    assert trl_update.main([*arguments, "--groups", "32"]) == 0
    assert warm_ups[3:] == [(32, 1)], "nothing of the sweep ran in this process"


def test_the_fastest_setting_of_a_sweep_is_taken_and_one_that_does_not_fit_is_not() -> None:
    wanted = trl_update.settings("8:on,16:on,8:off")
    assert wanted[2] == trl_update.Setting(8, checkpointing=False)
    tried = {each: Cell("update", "trl", {"micro": each.micro, "on": int(each.checkpointing)}) for each in wanted}
    found: list[dict[str, Any]] = [{"tokens_per_s": 10.0}, {"tokens_per_s": 12.0}, {"does_not_fit": "by far"}]
    records = [
        {"bench": cell.bench, "side": cell.side, "parameters": cell.parameters, "results": results}
        for cell, results in zip(tried.values(), found, strict=True)
    ]
    assert trl_update.fastest(tried, records) == wanted[1]
    with pytest.raises(RuntimeError, match="no setting of the sweep fits"):
        trl_update.fastest({wanted[2]: tried[wanted[2]]}, records)
    with pytest.raises(argparse.ArgumentTypeError, match="`8` is no setting"):
        trl_update.settings("8")


def test_the_word_tokenizer_has_a_word_for_every_token() -> None:
    tokenizer = trl_update.word_tokenizer("tiny", end=7)
    assert tokenizer("w5 w255 w7")["input_ids"] == [5, 255, 7]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (7, 8, 256)


def test_every_paradigm_of_learning_is_a_valid_recipe() -> None:
    options = types.SimpleNamespace(
        **{"staleness": [1, 2, 4], "seeds": [0, 1], "updates": 10, "model": "models/smollm2-135m", "set": []},
        **{"learning_rate": 1e-4, "prompts": 32, "group": 8, "max_tokens": 128, "every": 5, "held_out": 64},
    )
    cells = learning.cells_of(options)  # type: ignore[arg-type]
    assert len(cells) == 8
    for cell in cells:
        name = str(cell.parameters["paradigm"])
        recipe = load_recipe(learning.RECIPE, learning.overrides(cell, options), compare_as=name)  # type: ignore[arg-type]
        assert recipe.plan.staleness == cell.parameters["staleness"]


# -- vLLM's side against a stand-in with its interface -----------------------------------------------------------------


class _FakeLLM:
    """As much of `vllm.LLM` as the bench uses; prompts that it has seen are cached in blocks of 16."""

    def __init__(self, **options: Any) -> None:
        self.options, self.seen, self.adapters = options, set(), []
        config = types.SimpleNamespace(num_gpu_blocks=512, block_size=16)
        self.llm_engine = types.SimpleNamespace(vllm_config=types.SimpleNamespace(cache_config=config))

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool, lora_request: Any) -> list[Any]:
        assert not use_tqdm
        outputs = []
        self.adapters.append(lora_request)
        for prompt, sampling in zip(prompts, sampling_params, strict=True):
            assert (sampling["ignore_eos"], sampling["logprobs"], sampling["detokenize"]) == (True, 0, False)
            tokens = tuple(prompt["prompt_token_ids"])
            cached = len(tokens) // 16 * 16 if tokens in self.seen else 0
            self.seen.add(tokens)
            made = list(range(sampling["max_tokens"]))
            logprobs = [{token: types.SimpleNamespace(logprob=-0.5 * token)} for token in made]
            completion = types.SimpleNamespace(token_ids=made, logprobs=logprobs)
            outputs.append(types.SimpleNamespace(outputs=[completion], num_cached_tokens=cached))
        return outputs


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("vllm")
    fake.LLM, fake.SamplingParams = _FakeLLM, lambda **options: options  # type: ignore[attr-defined]
    request = types.ModuleType("vllm.lora.request")
    request.LoRARequest = lambda name, number, path: (name, number, path)  # type: ignore[attr-defined]
    for name, module in (("vllm", fake), ("vllm.lora", types.ModuleType("vllm.lora")), ("vllm.lora.request", request)):
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_CACHE_ROOT"):
        monkeypatch.setenv(name, "")  # so that it is as before when the test has ended
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("fake_vllm")
def test_the_side_of_vllm_asks_for_forced_lengths_and_deals_adapters(tmp_path: Path) -> None:
    from bench.gpu.vllm_side import VllmSide

    side = VllmSide("tiny", lora=True, max_context=256, folder=tmp_path)
    assert side._llm.options["max_loras"] == 3
    assert side._llm.options["load_format"] == "dummy"
    assert side.room() == 512 * 16
    outcome = side.generate([Ask((1, 2), 3, version=0), Ask((3, 4), 5, version=2)])
    assert outcome.tokens == 8
    assert [number for _, number, _ in side._llm.adapters[-1]] == [1, 3]
    filled = side.filled_steps([Ask(tuple(range(160)), 0), Ask(tuple(range(1, 161)), 0)], 4)
    assert filled.tokens == 8
    assert filled.details["cached_share"] == 1.0
    with pytest.raises(RuntimeError, match="were cached"):
        side.filled_steps([Ask(tuple(range(24)), 0)], 4)


@pytest.mark.usefixtures("fake_vllm")
def test_the_side_of_vllm_keeps_what_it_compiled_beside_a_model_at_a_path_that_stays(tmp_path: Path) -> None:
    from bench.gpu.vllm_side import VllmSide

    paths = set()
    for start in ("first", "second"):
        side = VllmSide("tiny", lora=False, max_context=64, folder=tmp_path / start, compile_cache=tmp_path / "kept")
        paths.add(side._llm.options["model"])
    assert os.environ["VLLM_CACHE_ROOT"] == str(tmp_path / "kept")
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    (path,) = paths
    assert Path(path).is_relative_to(tmp_path / "kept")
    assert (Path(path) / "config.json").exists()


@pytest.mark.usefixtures("fake_vllm")
def test_the_side_of_vllm_hands_over_tokens_with_their_log_probabilities(tmp_path: Path) -> None:
    from bench.gpu.vllm_side import VllmSide

    side = VllmSide("tiny", lora=False, max_context=64, folder=tmp_path, model_folder=tmp_path / "weights")
    assert (side._llm.options["model"], side._llm.options["load_format"]) == (str(tmp_path / "weights"), "auto")
    assert side.completions([Ask((1, 2), 3), Ask((3,), 1)]) == [([0, 1, 2], [0.0, -0.5, -1.0]), ([0], [0.0])]
