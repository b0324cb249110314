"""Optional: linear layers whose weights are quantized (bitsandbytes, torchao), or that compute in float8."""
