"""ExeGPT: plan and run large-language-model serving at the highest throughput a latency bound allows."""

__version__ = "0.1.0"
