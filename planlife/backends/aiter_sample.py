"""Calls of a site with rows that are empty, to ask aiter with and to compile by."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from ..spec import DTYPE_BYTES, PlanSpec

SampleTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


#: Those that models have, and aiter takes with any query: its reducer is another one for each.
SINK_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class LayerCaches(NamedTuple):
    """One layer's."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None


class SampleCall:
    """Tensors of calls of one site with up to `plan_rows` rows, over pages that no row has.

    caches: with each form that V may have, of each of `cache_bytes` or just above. Only their first page is there.
    variants: caches and sinks. Those of the first size without sinks, and with sinks of each dtype that models have;
        the others without: sizes choose aiter's decode kernel, sinks its reducer.
    """

    def __init__(self, spec: PlanSpec, plan_rows: int, device: str, cache_bytes: Sequence[int] = (0,)) -> None:
        q_dtype, kv_dtype = getattr(torch, spec.q_dtype), getattr(torch, spec.kv_dtype)
        heads, page, dim = spec.num_kv_heads, spec.page_size, spec.head_dim

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._length = spec.query_length
        query_shape = (plan_rows * spec.query_length, spec.num_q_heads, dim)
        self._query, self._output = zeros(*query_shape, dtype=q_dtype), zeros(*query_shape, dtype=q_dtype)
        self._block_tables = zeros(plan_rows, -(-spec.max_context_tokens // page), dtype=torch.int32)
        shapes = [(1, heads, page, dim) if spec.kv_layout == "hnd" else (1, page, heads, dim)] * 2
        if spec.kv_layout == "packed":
            pack = 16 // DTYPE_BYTES[spec.kv_dtype]
            shapes = [
                *((1, heads, dim // pack, page, pack), (1, heads, page // pack, dim, pack)),  # type: ignore[list-item]
                (1, heads, dim, page),
            ]
        key_cache, *value_caches = (zeros(*shape, dtype=kv_dtype) for shape in shapes)
        sinks = [None, *(zeros(spec.num_q_heads, dtype=one) for one in SINK_DTYPES)]
        scale = None
        if spec.scales != "none":
            shape = (1,) if spec.scales == "per_tensor" else (1, heads, page)
            scale = zeros(*shape, dtype=torch.float32).fill_(1)
        self.caches: list[LayerCaches] = []
        for num_bytes in cache_bytes:
            num_pages = max(1, -(-num_bytes // key_cache.nbytes))
            pages_of_scale = num_pages if spec.scales == "per_token" else 1
            one_scale = None if scale is None else as_if_of(pages_of_scale, scale)
            for value_cache in value_caches:
                keys, values = (as_if_of(num_pages, one) for one in (key_cache, value_cache))
                self.caches.append(LayerCaches(keys, values, one_scale, one_scale))

        first, others = self.caches[: len(value_caches)], self.caches[len(value_caches) :]
        self.variants = [*product(first, sinks), *((caches, None) for caches in others)]

    def call(self, num_rows: int, caches: LayerCaches) -> SampleTensors:
        """output, query, key_cache, value_cache and block_tables of that many rows."""
        end = num_rows * self._length
        caches_of_call = caches.key_cache, caches.value_cache
        return self._output[:end], self._query[:end], *caches_of_call, self._block_tables[:num_rows]


class _DLPack(ctypes.Structure):
    """DLManagedTensor, before DLPack had versions."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


#: By address, what torch has not given back yet.
_described: dict[int, tuple[_DLPack, torch.Tensor]] = {}


def _give_back(address: int) -> None:
    _described.pop(address, None)


_GIVE_BACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_give_back)


def as_if_of(num_pages: int, page: torch.Tensor) -> torch.Tensor:
    """A tensor of one page as one of `num_pages`, whose memory behind the first page is somebody else's, or nobody's.

    For calls whose rows are empty: host code reads sizes and addresses, and kernels no page.
    """
    if num_pages == 1:
        return page
    kinds = {"cpu": 1, "cuda": 2 if torch.version.hip is None else 10}  # kDLCPU, kDLCUDA, kDLROCM
    described = _DLPack(
        data=page.data_ptr(),
        device_type=kinds[page.device.type],
        device_id=page.device.index or 0,
        ndim=1,
        type_code=1,  # kDLUInt
        type_bits=8,
        type_lanes=1,
        shape=ctypes.pointer(ctypes.c_int64(num_pages * page.nbytes)),
        strides=ctypes.pointer(ctypes.c_int64(1)),
        deleter=ctypes.cast(_GIVE_BACK, ctypes.c_void_p),
    )
    address = ctypes.addressof(described)
    _described[address] = described, page
    make_capsule = ctypes.pythonapi.PyCapsule_New
    make_capsule.restype, make_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    whole = from_dlpack(make_capsule(address, b"dltensor", None))
    return whole.view(page.dtype).view(num_pages, *page.shape[1:])
