from jaxllm.pallas_kernels.rms_norm.api import rms_norm as rms_norm
