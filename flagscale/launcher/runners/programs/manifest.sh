# shellcheck shell=bash disable=SC2154
report manifest "$(python_program manifest "$project")"
