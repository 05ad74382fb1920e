"""Tensors on disk: our own checkpoints (`store`) and safetensors files under any names (`tensors`)."""
