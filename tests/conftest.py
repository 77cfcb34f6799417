"""What every test can use."""

import atexit
import os
import shutil
import signal
import tempfile

from hypothesis import HealthCheck, settings

pytest_plugins = ["support.needs", "bed.plugin"]

# A shell starts what it runs in the background without the one, nohup without the other, and
# programs of tests would inherit it. A handler goes no further than this process.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# Runs of tests are none of the user's.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="flagscale-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# How fast a machine makes up examples is no property of what they are for.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
