"""A Ctrl-C at every place of some code, one after the other."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import ClassVar


class InterruptAt:
    """Raises KeyboardInterrupt in the code of ``modules`` at the n-th place where the interpreter looks for signals."""

    CHECKS: ClassVar[set[str]] = {"CALL", "JUMP_BACKWARD", "RESUME"}

    def __init__(self, number: int, *modules: ModuleType) -> None:
        self.left, self._last = number, ""
        self._files = {module.__file__ for module in modules}

    def __call__(self, frame: FrameType, event: str, _: object) -> InterruptAt | None:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            before, self._last = self._last, dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if before in self.CHECKS:
                self.left -= 1
                if self.left == 0:
                    raise KeyboardInterrupt
        return self

    def run(self, work: Callable[[], object]) -> bool:
        """Whether ``work`` was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False
