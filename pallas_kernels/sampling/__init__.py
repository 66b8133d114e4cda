from jaxllm.pallas_kernels.sampling.api import best as best
from jaxllm.pallas_kernels.sampling.api import draw as draw
from jaxllm.pallas_kernels.sampling.api import normalize as normalize
from jaxllm.pallas_kernels.sampling.api import total_of as total_of
from jaxllm.pallas_kernels.sampling.reference import Draws as Draws
