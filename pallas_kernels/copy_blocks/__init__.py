from jaxllm.pallas_kernels.copy_blocks.api import copy_blocks as copy_blocks
