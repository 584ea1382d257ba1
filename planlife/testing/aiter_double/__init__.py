"""A strict double of aiter's FlyDSL paged decode."""

from .compile_keys import TileCompileError
from .double import AiterDouble, DoubleViolation, aiter_double
from .signatures import GENERATIONS, OPTIONAL, STRANGERS

__all__ = ["GENERATIONS", "OPTIONAL", "STRANGERS", "AiterDouble", "DoubleViolation", "TileCompileError", "aiter_double"]
