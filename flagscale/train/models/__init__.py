"""Model families (one module each) and the parts that their models are built from."""
