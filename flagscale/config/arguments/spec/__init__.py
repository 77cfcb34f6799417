"""Definition and parsing of arguments, from a YAML and from a command line, without rules."""
