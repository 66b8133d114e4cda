from jaxllm.pallas_kernels.matmul.api import einsum as einsum
