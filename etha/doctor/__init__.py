"""``etha doctor``: tries what a machine must be able to do for Etha, and says how to mend what fails.

machine.py checks this host, card.py its GPUs, hosts.py the agents of a namespace. Nothing is printed here.
"""

from etha.doctor.examination import examine
from etha.doctor.finding import Failing, Finding

__all__ = ["Failing", "Finding", "examine"]
