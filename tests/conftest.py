"""What every test can use."""

import signal

from hypothesis import HealthCheck, settings

pytest_plugins = ["bed.plugin"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it runs in the background so, and programs of tests would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How fast a machine makes up examples is no property of what they are for.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
