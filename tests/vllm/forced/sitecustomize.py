"""Every Python that starts with this folder in PYTHONPATH takes the path of ETHA_TEST_CPU: `make vllm CPU=avx2`.

Python imports a module of this name as it starts, so also in the processes that vLLM starts.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))
from tests.vllm import cpu_paths

cpu_paths.take()
