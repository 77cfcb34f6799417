"""Training under background traffic: models trained by DDP under several ways to all_reduce."""
