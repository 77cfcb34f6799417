"""Conversations to fine-tune on: read, rendered by a chat template, tokenized once, packed."""
