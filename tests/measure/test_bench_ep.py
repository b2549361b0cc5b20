# SPDX-License-Identifier: Apache-2.0
"""What bench ep prints, from figures that need no GPU."""

from rich.console import Console

from moe_backend.measure import bench_ep


def row(**us):
    out = bench_ep.Row(2, 128, 32, us=us, floor_us={"dispatch": 9.7, "combine": 19.0}, error=1e-3)
    return out


def test_ratios_compare_like_with_like():
    full = row(**{
        "dispatch": 20.0, "combine": 25.0, "both": 45.0, "nccl dispatch": 60.0,
        "nccl dispatch, counts read": 100.0, "nccl combine": 50.0,
        "all-gather + reduce-scatter": 90.0,
    })  # fmt: skip
    assert full.ratios() == {
        "dispatch / nccl, counts read": 5.0,
        "dispatch / nccl": 3.0,
        "combine / nccl": 2.0,
        "both / all-gather + reduce-scatter": 2.0,
    }
    console = Console(record=True, width=250)
    console.print(bench_ep.table([full.as_dict()]))
    text = console.export_text()
    assert "2 GPUs, µs" in text and " 32 " in text and "60.0 (3.00x)" in text and "9.7" in text


def test_a_wrong_exchange_has_no_time_and_says_so():
    wrong = row(**{"nccl dispatch": 60.0})
    wrong.failed["ours"] = "relative error 9.0e-01, allowed 5e-03"
    assert wrong.ratios() == {}
    console = Console(record=True, width=250)
    console.print(bench_ep.table([wrong.as_dict()]))
    assert "relative error 9.0e-01" in console.export_text()
