from jaxllm.pallas_kernels.zeros.api import zeros as zeros
