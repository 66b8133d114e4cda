from jaxllm.pallas_kernels.addition.api import add as add
