"""The layouts by the names that tests show; they are part of `planlife.testing`."""

from planlife.testing.decode_table import LAYOUTS, lay_out

__all__ = ["LAYOUTS", "lay_out"]
