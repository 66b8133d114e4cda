from jaxllm.pallas_kernels.grouped_matmul.api import product as product
