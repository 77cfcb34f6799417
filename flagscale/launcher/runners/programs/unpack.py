"""Unpack an archive of code into the project's directory, and remove the files that it lists.

Runs on a host, with the host's own Python. The archive is read from stdin as a whole first, so that
a truncated one changes nothing.
"""

import io
import json
import os
import sys
import tarfile

project = sys.argv[1]
os.umask(0o077)
with tarfile.open(fileobj=io.BytesIO(sys.stdin.buffer.read()), mode="r:gz") as packed:
    first, *members = packed.getmembers()
    packed.extractall(project, members)
    listed = packed.extractfile(first)
    for path in json.load(listed) if listed is not None else ():
        os.remove(os.path.join(project, path))  # noqa: PTH107, PTH118
