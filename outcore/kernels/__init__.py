"""AdamW and the split fp32 master, with the same bits on every device.

Each operation is written once for the host in C++ (``kernels/`` at the root of the repository),
once for the device in Triton, and once in plain torch operations for wherever neither is there.
The arithmetic is defined in ``kernels/outcore_kernels.h``.
"""

from .accumulate import accumulate_
from .adamw import adamw_
from .adamw_scalars import AdamWScalars
from .library import has_library, host_isa
from .master import join_master, split_master, split_master_

__all__ = [
    "AdamWScalars",
    "accumulate_",
    "adamw_",
    "has_library",
    "host_isa",
    "join_master",
    "split_master",
    "split_master_",
]
