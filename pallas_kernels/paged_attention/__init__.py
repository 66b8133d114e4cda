from jaxllm.pallas_kernels.paged_attention.api import KV_AXES as KV_AXES
from jaxllm.pallas_kernels.paged_attention.api import has_kernel as has_kernel
from jaxllm.pallas_kernels.paged_attention.api import kv_shape as kv_shape
from jaxllm.pallas_kernels.paged_attention.api import ragged_paged_attention as ragged_paged_attention
from jaxllm.pallas_kernels.paged_attention.batch import PagedBatch as PagedBatch
from jaxllm.pallas_kernels.paged_attention.reference import cap as cap
from jaxllm.pallas_kernels.paged_attention.reference import rounded as rounded
from jaxllm.pallas_kernels.paged_attention.reference import write_blocks as write_blocks
