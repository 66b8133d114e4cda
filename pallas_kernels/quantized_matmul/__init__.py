from jaxllm.pallas_kernels.quantized_matmul.api import OP as OP
from jaxllm.pallas_kernels.quantized_matmul.api import QuantizedWeight as QuantizedWeight
from jaxllm.pallas_kernels.quantized_matmul.api import product as product
from jaxllm.pallas_kernels.quantized_matmul.weight import stored_bytes as stored_bytes
