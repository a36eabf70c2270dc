"""The Triton kernels as PTX, without a GPU: ``python -m tests.unit.cuda.compiling 90``."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from etha.cuda.triton_kernels import PAIRS, cast_types, copy_bits, copy_cast

#: How CUDA's intrinsics, and with them torch, convert between floats; bfloat16 is integer arithmetic here.
EXACT = {"cvt.f32.f16", "cvt.f64.f16", "cvt.f64.f32", "cvt.rn.f16.f32", "cvt.rn.f32.f64"}


def ptx(kernel: Any, constants: dict[str, Any], capability: int) -> str:
    """What one kernel is for a GPU of that capability."""
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else "i64" for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={},
    )
    return str(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"])


def main() -> None:
    capability = int(sys.argv[1])
    bits = ptx(copy_bits, {}, capability)
    for access in ("ld.global.v2.b64", "st.global.v2.b64", "ld.global.b64", "st.global.b32", "ld.global.b16"):
        assert access in bits, f"no {access} in the kernel that copies bits"
    for source, target in sorted(PAIRS, key=str):
        found = ptx(copy_cast, cast_types(source, target), capability)
        if source.is_floating_point:
            used = set(re.findall(r"cvt\.\S*f(?:16|32|64)\S*", found))
            assert used <= EXACT, (source, target, used)
            rounds = target.itemsize < source.itemsize and target is not torch.bfloat16
            assert not rounds or used & {"cvt.rn.f16.f32", "cvt.rn.f32.f64"}, (source, target, used)
    assert cast_types(torch.float32, torch.bfloat16)["stores"] == tl.uint16
    print("all is well")


if __name__ == "__main__":
    main()
