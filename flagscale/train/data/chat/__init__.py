"""Conversations for supervised fine-tuning: reading, rendering, tokenizing, packing."""
