# shellcheck shell=bash disable=SC2154
say manifest "$(python_program manifest "$project")"
