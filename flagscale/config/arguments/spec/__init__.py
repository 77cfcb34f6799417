"""Definition, reading, writing and parsing of arguments, without rules between them."""
