"""Training on heterogeneous devices: pipelines over meshes, and micro-batches by measured speed."""
