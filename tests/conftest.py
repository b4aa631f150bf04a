"""Before torch is loaded: no matrix extension of the processor.

Some virtual machines name it (AMX) and do not grant it, and there a product in bfloat16 ends the process.
"""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
