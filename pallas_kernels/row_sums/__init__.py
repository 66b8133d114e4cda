from jaxllm.pallas_kernels.row_sums.api import row_sums as row_sums
