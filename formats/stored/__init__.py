"""What is in a model's folder, whatever its layout: files, tensors, quantized weights."""
