"""vLLM's home of what `LLM.get_metrics` returns."""

from jaxllm.engine.metrics import Counter as Counter
from jaxllm.engine.metrics import Gauge as Gauge
from jaxllm.engine.metrics import Histogram as Histogram
from jaxllm.engine.metrics import Metric as Metric
from jaxllm.engine.metrics import Vector as Vector
