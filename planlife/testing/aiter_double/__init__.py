"""A strict double of aiter's FlyDSL paged decode."""

from .double import AiterDouble, DoubleViolation, aiter_double
from .signatures import GENERATIONS, OPTIONAL, STRANGERS

__all__ = ["GENERATIONS", "OPTIONAL", "STRANGERS", "AiterDouble", "DoubleViolation", "aiter_double"]
