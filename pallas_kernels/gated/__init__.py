from jaxllm.pallas_kernels.gated.api import gated as gated
from jaxllm.pallas_kernels.gated.api import gated_product as gated_product
from jaxllm.pallas_kernels.gated.reference import ACTIVATIONS as ACTIVATIONS
