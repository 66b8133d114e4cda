from jaxllm.pallas_kernels.rotary.api import rotate as rotate
from jaxllm.pallas_kernels.rotary.api import rotate_qkv as rotate_qkv
