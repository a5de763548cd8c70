"""MXFP4: two 4-bit floats a byte, low nibble first, one power-of-two scale for 32 columns.

byte j of a row     hhhhllll     l: column 2j, h: column 2j + 1
nibble              s ee m       E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
scale byte s        2^(s - 127)  E8M0; 0 is 2^-127, 255 is infinity (refused at load)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
WORD = {2: torch.int32, 4: torch.int64, 8: torch.complex128}  # a pair of values seen as one element


class Tables(NamedTuple):
    """What a byte means."""

    pairs: Tensor  # [256] two values, one element of WORD
    scales: Tensor  # [256] 2^(byte - 127)


_TABLES: dict[tuple[torch.dtype, torch.device], Tables] = {}


def tables(dtype: torch.dtype, device: torch.device) -> Tables:
    """The tables of values of ``dtype`` (2, 4 or 8 bytes), made once for a device."""
    if (dtype, device) not in _TABLES:
        codes = torch.tensor(E2M1, dtype=dtype, device=device)
        byte = torch.arange(256, device=device)
        pairs = torch.stack([codes[byte & 15], codes[byte >> 4]], 1).view(WORD[dtype.itemsize]).view(256)
        scales = [2.0 ** (b - 127) for b in range(255)] + [float("inf")]
        _TABLES[dtype, device] = Tables(pairs, torch.tensor(scales, dtype=dtype, device=device))
    return _TABLES[dtype, device]


def unpack(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """packed uint8 [..., n/2], scale uint8 (or float8_e8m0fnu) [..., n/32] -> [..., n] in ``dtype``.

    Raises ValueError when the two do not belong together.
    """
    check_shapes(packed, scale)
    table = tables(dtype, packed.device)
    pairs = table.pairs.index_select(0, packed.reshape(-1).to(torch.int32)).view(dtype)
    factor = table.scales.index_select(0, scale.view(torch.uint8).reshape(-1).to(torch.int32))
    pairs.view(-1, GROUP).mul_(factor.unsqueeze(1))
    return pairs.view(*packed.shape[:-1], packed.shape[-1] * 2)


def unpack_traceable(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The same by arithmetic, for a trace that may hold no table; scale byte 0 reads as 0, not 2^-127."""
    code = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).to(torch.int32)
    size = code & 7
    large = 0.25 * ((2 + (size & 1)) << (size >> 1))
    value = torch.where(size < 2, 0.5 * size, large) * torch.where(code > 7, -1.0, 1.0)
    factor = (scale.view(torch.uint8).to(torch.int32) << 23).view(torch.float32)  # the byte is the exponent
    grouped = value.to(dtype).unflatten(-1, (scale.shape[-1], GROUP))
    return (grouped * factor.to(dtype).unsqueeze(-1)).flatten(-2)


def check_shapes(packed: Tensor, scale: Tensor) -> None:
    """Refuse anything that is not 16 bytes for each scale."""
    if packed.dtype != torch.uint8 or scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise ValueError(f"MXFP4 codes and scales must be uint8, got {packed.dtype} and {scale.dtype}")
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * GROUP:
        raise ValueError(
            f"MXFP4 codes {tuple(packed.shape)} need one scale for {GROUP} columns along the last dimension, "
            f"got scales {tuple(scale.shape)}"
        )


def pack(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [..., n] -> (packed uint8 [..., n/2], scale uint8 [..., n/32]).

    The scale is the OCP one, 2^(floor(log2 max) - 2), and values round to the nearest code, ties to the even
    code, saturating at 6. Raises ValueError when n is no multiple of 32 or a value is not finite.
    """
    if w.shape[-1] % GROUP:
        raise ValueError(f"MXFP4 packs whole groups of {GROUP} columns, got {w.shape[-1]}: pad the matrix")
    if not torch.isfinite(w).all():
        raise ValueError("MXFP4 has no code for infinity or NaN, and the matrix has one")
    grouped = w.to(torch.float64).unflatten(-1, (-1, GROUP))
    largest = grouped.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 1 - 2
    exponent = torch.where(largest > 0, exponent, 0).clamp(-127, 127)
    unit = torch.ldexp(grouped, -exponent.unsqueeze(-1))
    code = nearest_code(unit).flatten(-2)
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    return packed, (exponent + 127).to(torch.uint8)


def nearest_code(x: Tensor) -> Tensor:
    """The E2M1 code next to each value, ties to the even code; -0.0 keeps its sign."""
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for i in range(7):
        middle = (E2M1[i] + E2M1[i + 1]) / 2
        above = size >= middle if i % 2 else size > middle
        code += above.to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)
