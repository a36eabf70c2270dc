"""The main job on one machine: a trainer and an inference job, launched independently, meet over Etha.

    trainer (4 processes, FSDP2 x TP)  --- every few steps a version --->  inference (2 processes, TP)
              |  held-out loss, hashes                                         |  the same, of what arrived
              +-----------------> pipes to the launcher <---------------------+

The launcher compares what the two jobs report. Nothing of the comparison goes through Etha.
"""

from __future__ import annotations
