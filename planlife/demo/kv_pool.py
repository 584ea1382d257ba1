"""The toy engine's KV cache: tokens as they are stored, and the paged pool that holds them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .config import HEAD_DIM, NUM_KV_HEADS, PAGE_SIZE, DemoConfig
from .upload import upload

#: In a finite tail: far above any value that the model writes.
_LARGE = 1e4
#: Per tensor, of layer 0. Each layer has another one, so that a scale of the wrong layer shows.
_KEY_SCALE, _VALUE_SCALE = 1 / 32, 1 / 64


def page_bytes(config: DemoConfig) -> int:
    """Bytes that one page takes over all layers, keys and values, with their scales."""
    token_bytes = HEAD_DIM * getattr(torch, config.kv_dtype).itemsize + 4 * (config.kv_scales == "per_token")
    return 2 * (config.num_layers + 1) * PAGE_SIZE * NUM_KV_HEADS * int(token_bytes)


def layer_scales(num_layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-tensor scales of K and V: float32[layers]."""
    growth = 1 + torch.arange(num_layers) % 8 / 8
    return _KEY_SCALE * growth, _VALUE_SCALE * growth


@dataclass(frozen=True)
class KVTokens:
    """Keys and values as the cache stores them.

    key, value: kv_dtype[calls, tokens, kv_heads, D].
    key_scale, value_scale: float32[calls, tokens, kv_heads], what stored numbers are multiplied with; None without.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    @classmethod
    def store(cls, key: torch.Tensor, value: torch.Tensor, layers: Sequence[int], config: DemoConfig) -> KVTokens:
        """key, value float32[calls, tokens, kv_heads, D]; layers: of each call, the layer whose cache it is for."""
        dtype = getattr(torch, config.kv_dtype)
        if config.kv_scales == "none":
            return cls(key.to(dtype), value.to(dtype))
        largest = torch.finfo(dtype).max
        stored, scales = [], []
        for tensor, by_layer in zip((key, value), layer_scales(config.num_layers + 1), strict=True):
            if config.kv_scales == "per_token":
                scale = tensor.abs().amax(3).clamp_min(1e-6) / largest
            else:
                scale = upload(by_layer[list(layers)], tensor.device)[:, None, None].expand(tensor.shape[:3])
            stored.append((tensor / scale[..., None]).clamp(-largest, largest).to(dtype))
            scales.append(scale)
        return cls(*stored, *scales)

    def tokens(self, tokens: slice) -> KVTokens:
        """A part of the tokens, of all calls."""
        parts = (self.key, self.value, self.key_scale, self.value_scale)
        return KVTokens(*(part if part is None else part[:, tokens] for part in parts))  # type: ignore[arg-type]

    def meant(self, call: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the stored numbers stand for: key, value [tokens, kv_heads, D]; float32 where there are scales."""
        key, value = self.key[call], self.value[call]
        if self.key_scale is not None and self.value_scale is not None:
            key = key.float() * self.key_scale[call][..., None]
            value = value.float() * self.value_scale[call][..., None]
        return key, value


class KVPool:
    """Paged keys and values of all layers, and who owns which page.

    Owns: key, value kv_dtype[layers, ...] in the config's layout; key_scale, value_scale float32[layers, 1] per
    tensor, float32[layers, pages, kv_heads, page] per token, or None. Address-stable. Page 0 belongs to nobody: the
    keys of padded rows go there. A page without an owner holds NaN: a read through a wrong table shows.

    finite_tails: what an owned page holds behind its row's tokens is finite, as engines keep it for kernels that
        multiply it with a weight of 0; nothing there is small enough to hide. False: NaN there too.
    """

    def __init__(self, config: DemoConfig, *, num_pages: int, finite_tails: bool = False) -> None:
        num_layers, dtype = config.num_layers + 1, getattr(torch, config.kv_dtype)
        pack = 16 // dtype.itemsize
        lead = (num_layers, num_pages)
        shapes = {
            "nhd": ((*lead, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM),) * 2,
            "hnd": ((*lead, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM),) * 2,
            "packed": (
                (*lead, NUM_KV_HEADS, HEAD_DIM // pack, PAGE_SIZE, pack),
                (*lead, NUM_KV_HEADS, PAGE_SIZE // pack, HEAD_DIM, pack),
            ),
        }[config.layout]
        self.key, self.value = (torch.full(shape, torch.nan, dtype=dtype, device=config.device) for shape in shapes)
        self.key_scale: torch.Tensor | None = None
        self.value_scale: torch.Tensor | None = None
        if config.kv_scales == "per_tensor":
            scales = layer_scales(num_layers)
            self.key_scale, self.value_scale = (scale[:, None].to(config.device) for scale in scales)
        elif config.kv_scales == "per_token":
            shape = (*lead, NUM_KV_HEADS, PAGE_SIZE)
            self.key_scale, self.value_scale = (torch.full(shape, torch.nan, device=config.device) for _ in range(2))
        self._layout, self._pack = config.layout, pack
        self._is_per_token = config.kv_scales == "per_token"
        # FP8 numbers are moved as the bytes that they are: torch has few ops for them.
        self._is_fp8 = config.is_fp8
        large = min(torch.finfo(dtype).max, _LARGE)
        self._nan, self._large = (self._bits(torch.tensor([number]).to(dtype)).item() for number in (torch.nan, large))
        self._finite_tails = finite_tails
        self.num_pages = num_pages
        self._free = deque(range(1, num_pages))
        self._clean([0])

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        scales = (self.key_scale, self.value_scale)
        return self.key.nbytes + self.value.nbytes + sum(scale.nbytes for scale in scales if scale is not None)

    @property
    def num_usable_pages(self) -> int:
        """Pages that requests can own."""
        return self.num_pages - 1

    def allocate(self, num_pages: int) -> list[int]:
        """The pages that were free the longest. Raises RuntimeError if there are too few."""
        if num_pages > len(self._free):
            raise RuntimeError(
                f"{num_pages} KV pages asked for, {len(self._free)} of {self.num_pages} free: "
                "admission let too many requests in."
            )
        pages = [self._free.popleft() for _ in range(num_pages)]
        self._clean(pages)
        return pages

    def _clean(self, pages: Sequence[int]) -> None:
        """Make `pages` finite: keys that any query takes for likely, values that no average hides."""
        if self._finite_tails:
            self._fill(pages, key=0, value=self._large, scale=1.0)

    def release(self, pages: Sequence[int]) -> None:
        """Take `pages` back and fill them with NaN."""
        self._fill(pages, key=self._nan, value=self._nan, scale=torch.nan)
        self._free.extend(pages)

    def _fill(self, pages: Sequence[int], *, key: float, value: float, scale: float) -> None:
        """With numbers of `_bits`, in all layers."""
        index = upload(torch.tensor(pages), self.key.device)
        for cache, number in ((self.key, key), (self.value, value)):
            self._bits(cache).index_fill_(1, index, number)
        if self._is_per_token:
            for scales in self.scales_of(slice(None)):
                scales.index_fill_(1, index, scale)

    def scales_of(self, layer: int | slice) -> tuple[torch.Tensor, ...]:
        """The scales of K and of V as pa_decode takes them; nothing where there are none."""
        if self.key_scale is None or self.value_scale is None:
            return ()
        return self.key_scale[layer], self.value_scale[layer]

    def write(
        self,
        layer: int,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_scale: torch.Tensor | None = None,
        value_scale: torch.Tensor | None = None,
    ) -> None:
        """Put tokens at slots int64[tokens] (page * page_size + offset). Capture: yes. Syncs: no.

        key, value: kv_dtype[tokens, kv_heads, D]. key_scale, value_scale: float32[tokens, kv_heads], where they are
        per token.
        """
        pages, offsets = slots // PAGE_SIZE, slots % PAGE_SIZE
        key, value = self._bits(key), self._bits(value)
        keys, values = self._bits(self.key[layer]), self._bits(self.value[layer])
        if self._layout == "packed":
            keys.permute(0, 3, 1, 2, 4)[pages, offsets] = key.view(-1, *keys.shape[1:3], self._pack)
            values.permute(0, 2, 4, 1, 3)[pages, offsets // self._pack, offsets % self._pack] = value
        else:
            if self._layout == "hnd":
                keys, values = keys.transpose(1, 2), values.transpose(1, 2)
            keys[pages, offsets] = key
            values[pages, offsets] = value
        if self._is_per_token and key_scale is not None and value_scale is not None:
            for scales, new in zip(self.scales_of(layer), (key_scale, value_scale), strict=True):
                scales.transpose(1, 2)[pages, offsets] = new

    def _bits(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(torch.uint8) if self._is_fp8 else tensor
