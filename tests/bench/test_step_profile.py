"""The profile of a decode step, tried on a CPU, where no kernel is timed."""

import json
from pathlib import Path

from bench.gpu import step_profile


def test_a_tiny_model_is_timed_at_each_number_of_rows(tmp_path: Path) -> None:
    assert step_profile.main(["--tiny", "--rows", "3,12", "--out", str(tmp_path)]) == 0
    cells = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert sorted(cell["parameters"]["rows"] for cell in cells) == [3, 12]
    for cell in cells:
        results = cell["results"]
        assert results["tokens_per_s"] == cell["parameters"]["rows"] / results["step_ms"] * 1e3
        assert results["kernels"] == {}


def test_the_name_of_a_kernel_is_short() -> None:
    long = "void at::native::unrolled_elementwise_kernel<at::native::Copy<float>, 4>(int, float*)"
    assert step_profile.short_name(long) == "unrolled_elementwise_kernel"
    assert step_profile.short_name("_gate_kernel") == "_gate_kernel"
