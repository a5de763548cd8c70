"""MXFP4: two 4-bit floats a byte, low nibble first, one power-of-two scale for 32 columns.

byte j of a row     hhhhllll     l: column 2j, h: column 2j + 1
nibble              s ee m       E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
scale byte s        2^(s - 127)  E8M0; 0 is 2^-127, 255 is infinity (refused at load)
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_PAIRS: dict[torch.dtype, Tensor] = {}
_SCALES: dict[torch.dtype, Tensor] = {}


def byte_pairs(dtype: torch.dtype) -> Tensor:
    """[256, 2]: the two values of every byte."""
    if dtype not in _PAIRS:
        codes = torch.tensor(E2M1, dtype=dtype)
        byte = torch.arange(256)
        _PAIRS[dtype] = torch.stack([codes[byte & 15], codes[byte >> 4]], 1)
    return _PAIRS[dtype]


def byte_scales(dtype: torch.dtype) -> Tensor:
    """[256]: the power of two of every scale byte."""
    if dtype not in _SCALES:
        values = [2.0 ** (byte - 127) for byte in range(255)] + [float("inf")]
        _SCALES[dtype] = torch.tensor(values, dtype=dtype)
    return _SCALES[dtype]


def scale_values(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """2^(byte - 127) for scale bytes (uint8, or float8_e8m0fnu seen as bytes)."""
    return byte_scales(dtype)[scale.view(torch.uint8).to(torch.int32)]


def unpack(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """packed uint8 [..., n/2], scale uint8 [..., n/32] -> [..., n] in ``dtype``.

    Raises ValueError when the two shapes do not belong together.
    """
    check_shapes(packed, scale)
    values = byte_pairs(dtype)[packed.to(torch.int32)].flatten(-2)
    grouped = values.unflatten(-1, (scale.shape[-1], GROUP))
    return (grouped * scale_values(scale, dtype).unsqueeze(-1)).flatten(-2)


def check_shapes(packed: Tensor, scale: Tensor) -> None:
    """Refuse anything that is not 16 bytes for each scale."""
    if packed.dtype != torch.uint8:
        raise ValueError(f"MXFP4 codes must be uint8, two to a byte, and not {packed.dtype}")
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
