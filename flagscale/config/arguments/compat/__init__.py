"""Names and values of Megatron-LM, FlagScale and Hugging Face that this project replaces or
refuses."""
