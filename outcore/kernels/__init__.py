"""AdamW, over exact or compact state, and the split fp32 master, with one result on every device.

Each operation is written once for the host in C++ (``kernels/`` at the root of the repository),
once for the device in Triton, and once in plain torch operations for wherever neither is there.
The arithmetic is defined in ``kernels/outcore_kernels.h``.
"""

from .accumulate import accumulate_
from .adamw import adamw_
from .adamw_scalars import AdamWScalars
from .compact import adamw_compact_
from .compact_format import (
    BLOCK,
    CompactFormat,
    CompactMoments,
    bytes_per_parameter,
    decode_moments,
    encode_moments,
    join_master24,
    num_blocks,
    split_master24,
    state_bytes,
    zero_moments,
)
from .library import has_library, host_isa
from .master import join_master, split_master, split_master_

__all__ = [
    "BLOCK",
    "AdamWScalars",
    "CompactFormat",
    "CompactMoments",
    "accumulate_",
    "adamw_",
    "adamw_compact_",
    "bytes_per_parameter",
    "decode_moments",
    "encode_moments",
    "has_library",
    "host_isa",
    "join_master",
    "join_master24",
    "num_blocks",
    "split_master",
    "split_master24",
    "split_master_",
    "state_bytes",
    "zero_moments",
]
