"""What every test shares: one thread a worker, fixed seeds, no GPU tests without a GPU."""

from __future__ import annotations

import os
import random
import shutil
import sys

# Before anything imports torch or numpy. Two workers on two cores, one thread each: more threads
# than cores can make a CPU model twenty times slower.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# Without a GPU the kernels run in Triton's interpreter, which must be chosen before triton is
# imported.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
from hypothesis import settings

# The same examples in every run; --hypothesis-profile=explore looks for new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here")
