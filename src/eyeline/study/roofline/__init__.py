"""What a training step does on a GPU, counted without one: every operator recorded on tensors without memory, and priced."""
