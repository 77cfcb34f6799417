"""Commands of ``flagscale`` that are more than one action: other forms of a command line, new
experiments and completion.
"""
