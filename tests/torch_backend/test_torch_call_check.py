"""The call checker on real tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planlife.call_check import CallChecker
from planlife.errors import ConfigError
from planlife.spec import PlanSpec
from planlife.torch_device import CpuDevice

SPEC = PlanSpec(8, 2, 64, 16, max_context_tokens=4096)
CPU = CpuDevice()


def good_call(**changed: Any) -> dict[str, Any]:
    kv = torch.zeros(10, 2, 16, 2, 64, dtype=torch.bfloat16)
    return {
        "plan_rows": 5,
        "class_rows": 8,
        "output": torch.zeros(5, 8, 64, dtype=torch.bfloat16),
        "query": torch.zeros(5, 8, 64, dtype=torch.bfloat16),
        "key_cache": kv[:, 0],
        "value_cache": kv[:, 1],
        "block_tables": torch.zeros(5, 7, dtype=torch.int32),
        "softmax_scale": 0.125,
        "key_scale": None,
        "value_scale": None,
        "sinks": None,
        "lse": None,
        **changed,
    }


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"query": torch.zeros(5, 8, 64)}, "query's dtype is torch.float32, wanted bfloat16"),
        ({"query": torch.zeros(5, 8, 64, dtype=torch.bfloat16, device="meta")}, "query's device is meta.*cpu"),
        ({"query": torch.zeros(5, 64, 8, dtype=torch.bfloat16).transpose(1, 2)}, "query's last stride is 8"),
        ({"output": torch.zeros(9, 8, 64, dtype=torch.bfloat16)}, r"output's shape is \[9, 8, 64\]"),
        ({"key_cache": torch.zeros(10, 16, 2, 64)}, "key_cache's dtype is torch.float32"),
        ({"value_cache": torch.zeros(10, 2, 16, 64, dtype=torch.bfloat16)}, "value_cache's shape"),
        ({"block_tables": torch.zeros(5, 7, dtype=torch.int64)}, "dtype is torch.int64, wanted int32"),
        ({"softmax_scale": torch.tensor(0.125)}, "softmax_scale is a tensor on cpu"),
        ({"softmax_scale": torch.zeros(1, device="meta")}, "softmax_scale is a tensor on meta"),
        ({"key_scale": torch.ones(1)}, "key_scale is a tensor on cpu, wanted None"),
    ],
)
def test_a_wrong_tensor_is_named_before_and_after_a_good_call(changed, named):
    for warm in (False, True):
        checker = CallChecker("dense", SPEC, CPU)
        call = good_call()
        if warm:
            checker.check(*call.values())
        with pytest.raises(ConfigError, match=named):
            checker.check(*{**call, **changed}.values())
        checker.check(*call.values())


def test_new_views_of_the_same_cache_pass_every_time():
    checker, call = CallChecker("dense", SPEC, CPU), good_call()
    base = torch.zeros(10, 2, 16, 2, 64, dtype=torch.bfloat16)
    for _ in range(3):
        checker.check(*{**call, "key_cache": base[:, 0], "value_cache": base[:, 1]}.values())


def test_inference_tensors_pass():
    checker = CallChecker("dense", SPEC, CPU)
    with torch.inference_mode():
        call = good_call()
        checker.check(*call.values())
        checker.check(*call.values())
