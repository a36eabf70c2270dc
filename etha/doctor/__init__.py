"""``etha doctor``: what a machine must be able to do for Etha, tried for real, and how to mend what fails.

machine.py looks at this host, card.py at its GPUs, hosts.py at the agents of a namespace. Nothing is printed here.
"""

from etha.doctor.examination import examine
from etha.doctor.finding import Failing, Finding

__all__ = ["Failing", "Finding", "examine"]
