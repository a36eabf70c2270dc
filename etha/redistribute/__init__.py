"""etha.redistribute: moves a DTensor of one job from any layout to any other, planned as a whole."""

from etha.redistribute.call import redistribute

__all__ = ["redistribute"]
