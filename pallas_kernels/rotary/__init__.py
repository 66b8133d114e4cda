from jaxllm.pallas_kernels.rotary.api import rotate as rotate
