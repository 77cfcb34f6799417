"""Conversion between this project's checkpoints and those of Hugging Face and Megatron-LM.

``lazy_tensors`` reads tensors on demand, a region at a time. ``weight_mappings`` and
``weight_transforms`` define which Hugging Face tensors make which megatron.core tensor.
``huggingface``, ``torch_dist``, ``megatron_torch`` and ``megatron_dist`` are the formats.
``convert`` converts between them, and ``pretrained`` loads any of them into a model to train.
"""
